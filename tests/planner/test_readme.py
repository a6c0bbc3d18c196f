"""Every figure in the planner's README and in comments of its constants equals what the code computes."""

import re
from statistics import mean

import pytest

from parakit.config.files import ROOT
from parakit.planner.readings.facts import source_facts
from parakit.planner.readings.intervals import ERRORS_FILE
from parakit.planner.readings.residual import Residuals
from parakit.planner.readings.summary import (
    collect_errors,
    evaluate_choices,
    group_by_coverage,
    group_by_kind,
    group_by_split,
    predict_device_memory,
)
from parakit.planner.time.constants import CONSTANT_NAMES, load_constants
from parakit.planner.verdict import Fit, judge_fit_on_cluster
from tests.planner.readings.fit import BOUNDS

README = (ROOT / "src" / "parakit" / "planner" / "README.md").read_text()
MEASUREMENTS = (ROOT / "src" / "parakit" / "planner" / "readings" / "README.md").read_text()
_UNITS = {"µs": 1e-6}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def number(cell: str) -> float:
    """Return a cell's number: `2000 µs` in seconds, `0.87` unchanged."""
    match = re.match(r"([\d.]+) ?(µs)?", cell)
    assert match
    return float(match[1]) * _UNITS.get(match[2], 1.0)


@pytest.fixture(scope="module")
def predicted(published_residuals: Residuals) -> Residuals:
    return published_residuals


def test_held_out_errors_in_readme_are_current(predicted: Residuals) -> None:
    for group in (*group_by_kind(predicted), *group_by_split(predicted)):
        (line,) = (line for line in README.splitlines() if line.startswith(f"| {group.name} |"))
        _, count, _, mean_error, median, bias, *_blind = cells(line)
        assert (int(count), mean_error) in (
            (len(group.errors), f"{group.figures['mean_abs_error']:.1%}"),
            (len(group.errors), ""),
        )
        assert (median, bias) == (
            f"{group.figures['median_abs_error']:.1%}",
            f"{group.figures['median_error']:+.1%}",
        )


def test_number_of_predicted_measurements_in_readme_is_current(predicted: Residuals) -> None:
    count, every = len(predicted.predicted), len(predicted.predicted) + len(predicted.refused)
    assert f"`make validate` predicts {count:,} of {every:,} published" in README
    assert f"`make validate` predicts {count:,} published" in (ROOT / "README.md").read_text()


def test_regret_in_readme_is_current(predicted: Residuals) -> None:
    regrets = [choice.regret for choice in evaluate_choices(predicted)]
    text = " ".join(README.split())
    assert f"In {len(regrets)} groups of published runs that differ only in strategy" in text
    # The top of the page warns with the same figures.
    loss = (
        f"is {mean(regrets):.1%} slower than the fastest on average and {max(regrets):.0%} at worst"
    )
    assert text.count(loss) == 2


def test_constants_in_readme_are_those_of_the_file() -> None:
    for name in CONSTANT_NAMES:
        (line,) = (line for line in MEASUREMENTS.splitlines() if f"(`{name}`) |" in line)
        _, *fitted, bounds = cells(line)
        for cell, generation in zip(fitted, ("ampere", "hopper", "blackwell"), strict=True):
            value = getattr(load_constants(generation), name)
            assert number(cell) == pytest.approx(value, rel=0.02, abs=1e-9)
        assert [number(part) for part in bounds.split(" to ")] == pytest.approx(BOUNDS[name])


def test_runs_that_trained_are_predicted_to_fit(predicted: Residuals) -> None:
    verdicts: dict[str, list[Fit]] = {"dense": [], "mixtures": [], "sharded weights": []}
    seen = set()
    for item in predicted.predicted:
        spec, cluster, source = (
            item.measured_run.spec,
            item.measured_run.cluster,
            item.measurement.source,
        )
        run = (spec, cluster.device.key)
        if item.seconds is None or run in seen or source.startswith("VIA-Research/vTrain"):
            continue
        if source_facts(item.measurement)["unjudged"]:
            continue
        seen.add(run)
        sharded = spec.parallelism.sharding.shards_weights
        kind = "sharded weights" if sharded else "mixtures" if spec.shape.experts else "dense"
        verdicts[kind].append(
            judge_fit_on_cluster(spec, predict_device_memory(spec, cluster), cluster)
        )
    for kind, least, limit in (
        ("dense", 500, 0.02),
        ("mixtures", 150, 0.05),
        ("sharded weights", 120, 0.05),
    ):
        fits = verdicts[kind]
        wrong = fits.count(Fit.DOES_NOT_FIT)
        assert len(fits) > least
        assert wrong / len(fits) <= limit
        (line,) = (line for line in README.splitlines() if line.startswith(f"| {kind}, ran |"))
        assert [int(cell) for cell in cells(line)[1:]] == [
            len(fits),
            fits.count(Fit.FITS),
            fits.count(Fit.CLOSE),
            wrong,
        ]


def test_errors_of_plans_in_readme_are_current(predicted: Residuals) -> None:
    assert collect_errors(predicted).to_csv() == ERRORS_FILE.read_text()


def test_coverage_of_intervals_in_readme_is_current(predicted: Residuals) -> None:
    for kind in group_by_coverage(predicted, collect_errors(predicted)):
        (line,) = (
            line for line in README.splitlines() if line.startswith(f"| {kind.name}, inside |")
        )
        shares = [
            coverage[level] for coverage in (kind.shares, kind.elsewhere) for level in (0.80, 0.95)
        ]
        assert cells(line)[1:] == [str(kind.readings), *(f"{share:.0%}" for share in shares)]
        if kind.name == "all time":
            warning = f"contains the published time in only {kind.elsewhere[0.80]:.0%} of cases"
            assert warning in " ".join(README.split())
        if kind.readings < 20:
            continue
        # The best choice of the distance leaves some kinds one or two measurements outside of these bands.
        slack = 2 / kind.readings
        assert 0.72 - slack <= kind.shares[0.80] <= 0.88 + slack
        assert 0.90 - slack <= kind.shares[0.95] <= 0.98 + slack
