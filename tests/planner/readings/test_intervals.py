from math import exp, log

import pytest

from parakit.planner.readings.intervals import PredictionErrors, load_public_errors
from parakit.planner.readings.residual import Residual, compute_residuals
from parakit.planner.readings.table import read_measurements


@pytest.fixture(scope="module")
def same_source_residuals() -> list[Residual]:
    """Return residuals of a single source, enough to compute an interval."""
    readings, _ = read_measurements()
    measurements = [
        measurement for measurement in readings if "vTrain multi-node" in measurement.source
    ]
    return list(compute_residuals(measurements).predicted)


def test_interval_of_higher_level_contains_interval_of_lower_level(
    same_source_residuals: list[Residual],
) -> None:
    errors = PredictionErrors.collect(same_source_residuals)
    for item in same_source_residuals:
        low, high = errors.interval(item, 0.80)
        wider = errors.interval(item, 0.95)
        assert wider[0] <= low < high <= wider[1]


def test_interval_spans_factor_two_without_measurements_of_another_source(
    same_source_residuals: list[Residual],
) -> None:
    item = same_source_residuals[0]
    errors = PredictionErrors.collect(same_source_residuals)
    missed = [
        residual for residual in same_source_residuals if abs(log(1 + residual.error)) < log(2)
    ]
    assert all(0.80 in errors.find_covering_levels(residual, elsewhere=True) for residual in missed)
    few = PredictionErrors.collect(same_source_residuals[:19])
    assert few.interval(item, 0.80) == pytest.approx((item.predicted / 2, item.predicted * 2))


def test_interval_excludes_errors_of_the_same_configuration(
    same_source_residuals: list[Residual],
) -> None:
    without_first = PredictionErrors.collect(
        [
            residual
            for residual in same_source_residuals
            if residual.measured_run.spec != same_source_residuals[0].measured_run.spec
        ]
    )
    assert PredictionErrors.collect(same_source_residuals).interval(
        same_source_residuals[0], 0.95
    ) == without_first.interval(same_source_residuals[0], 0.95)


def test_expected_errors_include_those_of_a_given_file(
    same_source_residuals: list[Residual],
) -> None:
    item = same_source_residuals[0]
    spec, cluster = item.measured_run.spec, item.measured_run.cluster
    public = load_public_errors().expected(spec, cluster, item.seconds or 0.0)
    both = PredictionErrors.collect(same_source_residuals).merge(load_public_errors())
    expected = both.expected(spec, cluster, item.seconds or 0.0)
    assert public is not None
    assert expected is not None
    assert expected.measurements >= public.measurements
    shortest, longest = expected.seconds(2.0, 0.80)
    low, high = expected.errors[0.80]
    assert (shortest, longest) == (2.0 * exp(-high), 2.0 * exp(-low))
