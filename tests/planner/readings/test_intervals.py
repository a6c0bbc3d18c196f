from math import exp, log

import pytest

from parakit.planner.readings.intervals import PredictionErrors, load_public_errors
from parakit.planner.readings.residual import Residual, compute_residuals
from parakit.planner.readings.table import read_measurements


@pytest.fixture(scope="module")
def alike() -> list[Residual]:
    """Of one source, as many as an interval is made of."""
    readings, _ = read_measurements()
    found = [one for one in readings if "vTrain multi-node" in one.source]
    return list(compute_residuals(found).predicted)


def test_a_higher_level_holds_a_lower_one(alike: list[Residual]) -> None:
    errors = PredictionErrors.collect(alike)
    for item in alike:
        low, high = errors.interval(item, 0.80)
        wider = errors.interval(item, 0.95)
        assert wider[0] <= low < high <= wider[1]


def test_where_no_other_source_has_measured_the_error_may_be_twofold(alike: list[Residual]) -> None:
    item = alike[0]
    errors = PredictionErrors.collect(alike)
    missed = [each for each in alike if abs(log(1 + each.error)) < log(2)]
    assert all(errors.covers(each, 0.80, elsewhere=True) for each in missed)
    few = PredictionErrors.collect(alike[:19])
    assert few.interval(item, 0.80) == pytest.approx((item.predicted / 2, item.predicted * 2))


def test_a_layout_s_own_error_is_not_in_its_interval(alike: list[Residual]) -> None:
    others = PredictionErrors.collect(
        [each for each in alike if each.measured_run.spec != alike[0].measured_run.spec]
    )
    assert PredictionErrors.collect(alike).interval(alike[0], 0.95) == others.interval(
        alike[0], 0.95
    )


def test_what_a_file_says_beside_the_public_errors_counts(alike: list[Residual]) -> None:
    item = alike[0]
    spec, cluster = item.measured_run.spec, item.measured_run.cluster
    public = load_public_errors().expected(spec, cluster, item.seconds or 0.0)
    both = PredictionErrors.collect(alike).merge(load_public_errors())
    found = both.expected(spec, cluster, item.seconds or 0.0)
    assert public is not None
    assert found is not None
    assert found.measurements >= public.measurements
    least, most = found.seconds(2.0, 0.80)
    low, high = found.errors[0.80]
    assert (least, most) == (2.0 * exp(-high), 2.0 * exp(-low))
