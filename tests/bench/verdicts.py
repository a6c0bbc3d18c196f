"""Measure how often a verdict on two times is wrong, and how often a difference is detected:
`python -m tests.bench.verdicts`.

Runs are simulated with a scatter per side and correlated iterations (AR(1)). A cell is a pair of scatters and
numbers of runs. Its columns are false verdicts on equal times, true verdicts if the second side takes 3% or 5%
longer, and how often the interval of the ratio contains the true value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import percent
from parakit.reporting.analyse.statistics import (
    ON_GPUS,
    REPEATS_FOR_TRUST,
    Estimate,
    IntervalMethod,
    TimeVerdict,
    compare_times,
    estimate_from_medians,
    estimate_time,
)

SCATTERS, RUNS, KEPT = (0.002, 0.005, 0.01, 0.02), (1, 2, 3, 5), (0.0, 0.7)
LIMIT = 0.06
_SPREAD, _LENGTH, _SHAPES = 0.01, 100, 200
Side = tuple[float, int]
"""Scatter between runs, and number of runs."""
Shape = tuple[float, float, float]
"""Median of a run and the ends of its interval, for a true time of 1."""


@dataclass(frozen=True)
class VerdictRates:
    """Fractions of the trials of a cell."""

    kept: float
    first: Side
    second: Side
    false: float
    seen_3_percent: float
    seen_5_percent: float
    covered: float


def rates(trials: int, seed: int = 1) -> Iterator[VerdictRates]:
    """Yield every cell. A pair of sides is not repeated in swapped order."""
    generator = np.random.default_rng(seed)
    for kept in KEPT:
        shapes = [_shape(kept, generator) for _ in range(_SHAPES)]
        sides = [(scatter, runs) for scatter in SCATTERS for runs in RUNS]
        for index, first in enumerate(sides):
            for second in sides[index:]:
                yield _cell(kept, first, second, shapes, trials, generator)


def _cell(
    kept: float,
    first_side: Side,
    second_side: Side,
    shapes: list[Shape],
    trials: int,
    generator: np.random.Generator,
) -> VerdictRates:
    counts = np.zeros(4)
    for _ in range(trials):
        first, second = (_side(side, shapes, generator) for side in (first_side, second_side))
        equal = compare_times(first, second)
        clear = [compare_times(first, second, weight).verdict.is_clear for weight in (1.03, 1.05)]
        covered = equal.low is not None and equal.high is not None and equal.low <= 1 <= equal.high
        counts += (equal.verdict is not TimeVerdict.NOISE, *clear, covered)
    return VerdictRates(kept, first_side, second_side, *(counts / trials).tolist())


def _side(side: Side, shapes: list[Shape], generator: np.random.Generator) -> Estimate:
    scatter, count = side
    levels = 1 + scatter * generator.standard_normal(count)
    drawn = [shapes[index] for index in generator.integers(len(shapes), size=count)]
    medians = [level * middle for level, (middle, _, _) in zip(levels, drawn, strict=True)]
    within = [
        (level * low, level * high) for level, (_, low, high) in zip(levels, drawn, strict=True)
    ]
    method = IntervalMethod.RUNS if count >= REPEATS_FOR_TRUST else IntervalMethod.BOOTSTRAP
    counts = (count * _LENGTH, count, _SPREAD)
    return estimate_from_medians(medians, within, ON_GPUS, counts, method)


def _shape(kept: float, generator: np.random.Generator) -> Shape:
    values = np.zeros(_LENGTH + 50)
    for index, shock in enumerate(generator.standard_normal(len(values) - 1), start=1):
        values[index] = kept * values[index - 1] + (1 - kept**2) ** 0.5 * shock
    samples = 1 + _SPREAD * values[50:]
    estimate = estimate_time([samples.tolist()])
    assert estimate is not None
    # The scatter that a single run is assumed to have is removed.
    half = (
        1.96 * ((estimate.standard_error or 0.0) ** 2 - ON_GPUS.assumed**2) ** 0.5 * estimate.median
    )
    return estimate.median, estimate.median - half, estimate.median + half


def _written(side: Side) -> str:
    return f"{side[1]} of {side[0]:.1%}"


_TABLE = (
    Column[VerdictRates]("AR(1)", lambda cell: cell.kept),
    Column[VerdictRates]("One", lambda cell: cell.first, _written),
    Column[VerdictRates]("Two", lambda cell: cell.second, _written),
    Column[VerdictRates]("False verdicts", lambda cell: cell.false, percent),
    Column[VerdictRates]("3% seen", lambda cell: cell.seen_3_percent, percent),
    Column[VerdictRates]("5% seen", lambda cell: cell.seen_5_percent, percent),
    Column[VerdictRates]("Covered", lambda cell: cell.covered, percent),
)


def main(arguments: list[str]) -> int:
    """Print the table. Return 1 if a cell has more false verdicts than allowed, beyond chance."""
    trials = int(arguments[0]) if arguments else 1000
    cells = tuple(rates(trials))
    print(markdown_table(Table(_TABLE, cells)))
    worst = max(cells, key=lambda cell: cell.false)
    print(f"\nMost false verdicts: {worst.false:.1%} of {trials} ({_written(worst.first)} against")
    print(f"{_written(worst.second)}, AR(1) {worst.kept}); at most {LIMIT:.0%} are promised.")
    return int(worst.false > LIMIT + 3 * (LIMIT / trials) ** 0.5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
