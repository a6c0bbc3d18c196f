"""Comparison of two kinds of iterations within runs, by which differences between runs cancel out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from parakit.reporting.analyse.resampling import Floats, block_length
from parakit.reporting.analyse.statistics import TimeComparison, TimeVerdict

_DRAWS = 2000
Centre = Callable[[Floats], float]


def fastest_half(values: Floats) -> float:
    """Return the mean of the lower half, because other load only adds to times."""
    return float(np.sort(values)[: max(1, len(values) // 2)].mean())


def compare_within_runs(
    reference: Sequence[Sequence[float]], other: Sequence[Sequence[float]], centre: Centre
) -> TimeComparison:
    """Return the time ratio of `other` over `reference` with the interval of a block bootstrap."""
    reference_runs, other_runs = (
        [np.asarray(run, dtype=float) for run in runs] for runs in (reference, other)
    )
    ratio = float(
        np.mean([centre(run) for run in other_runs])
        / np.mean([centre(run) for run in reference_runs])
    )
    generator = np.random.default_rng(20250901)
    lengths = {
        id(run): block_length(run) if len(run) > 1 else 1 for run in (*reference_runs, *other_runs)
    }

    def drawn(runs: Sequence[Floats]) -> float:
        """Return the centre of a bootstrap sample: as many runs, of circular blocks."""
        parts = []
        for values in (runs[index] for index in generator.integers(len(runs), size=len(runs))):
            count, length = len(values), lengths[id(values)]
            starts = generator.integers(count, size=(-(-count // length), 1))
            parts.append(values[((starts + np.arange(length)) % count).ravel()[:count]])
        return centre(np.concatenate(parts))

    draws = [drawn(other_runs) / drawn(reference_runs) for _ in range(_DRAWS)]
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    verdict = TimeVerdict.SLOWER if ratio > 1 else TimeVerdict.FASTER
    verdict = TimeVerdict.NOISE if low <= 1 <= high else verdict
    return TimeComparison(ratio, low, high, verdict, high / low - 1)
