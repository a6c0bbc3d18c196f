"""Which iteration lines of a log are measurements, and why the others are not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.report.read.scraped import Iteration, ScrapedLog

MIN_FOR_WARM_UP = 8
"""Fewer samples than this show no trend above the noise."""
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Window:
    """The samples that count."""

    samples_ms: tuple[float, ...] = ()
    iterations: tuple[int, ...] = ()
    """The iteration of each sample."""
    dropped: tuple[tuple[str, int], ...] = ()
    """Why lines do not count, and how many, in the order of the rules."""

    @property
    def text(self) -> str:
        """Window, sample count and what was left out, as text."""
        if not self.samples_ms:
            span = "no samples"
        else:
            count = len(self.samples_ms)
            span = f"{count} samples, iterations {self.iterations[0]} to {self.iterations[-1]}"
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.dropped)
        return f"{span}; left out: {left_out}" if left_out else span


def select_window(log: ScrapedLog) -> Window:
    """Choose the lines whose time is that of a settled, whole iteration.

    Known traps go first (first line after a start, the averaged second one, the line after an
    evaluation or a checkpoint, skipped steps), then warm-up as the data shows it. Pauses that
    would take more than half of the lines are kept: then they are the run's normal state.
    """
    reasons: Counter[str] = Counter()
    kept: list[Iteration] = []
    keep_paused = sum(found.after_pause for found in log.iterations) > len(log.iterations) / 2
    for found in log.iterations:
        reason = _trap(found, keep_paused)
        if reason:
            reasons[reason] += 1
        else:
            kept.append(found)
    times = [found.elapsed_ms for found in kept if found.elapsed_ms is not None]
    warm_up = warm_up_length(times)
    if warm_up:
        reasons["warm-up"] = warm_up
    return Window(
        tuple(times[warm_up:]),
        tuple(found.iteration for found in kept[warm_up:]),
        tuple(reasons.items()),
    )


def warm_up_length(samples: Sequence[float]) -> int:
    """Number of leading samples that are not yet settled, at most half of them.

    MSER (White 1997): the cut that makes the rest's mean most certain. It is taken only if what it
    cuts off is clearly apart from the rest, so that noise alone drops nothing.
    """
    count = len(samples)
    if count < MIN_FOR_WARM_UP:
        return 0
    values = np.asarray(samples, dtype=float)
    settled = values[count // 2 :]
    middle, spread = float(np.median(settled)), robust_spread(settled)
    # One hiccup late in the run must not decide where the beginning ends.
    limit = max(5 * spread, 1e-9 * abs(middle))
    clipped = np.clip(values, middle - limit, middle + limit)
    cut = int(np.argmin(_certainty(clipped)))
    if cut == 0 or abs(float(np.median(values[:cut])) - middle) <= 2 * spread:
        return 0
    return cut


def robust_spread(values: NDArray[np.float64]) -> float:
    """Standard deviation as estimated from the median absolute deviation."""
    return _MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def _trap(found: Iteration, keep_paused: bool) -> str:
    if found.elapsed_ms is None or not math.isfinite(found.elapsed_ms) or found.elapsed_ms <= 0:
        return "without a time"
    if found.first_of_start:
        return "first after a start"
    if found.averaged:
        return "averaged over two iterations"
    if found.after_pause and not keep_paused:
        return "after an evaluation or checkpoint"
    return "skipped steps" if found.skipped_iterations else ""


def _certainty(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared standard error of the mean of values[d:], for d up to half."""
    count = len(values)
    left = count - np.arange(count // 2 + 1)
    sums = np.cumsum(values[::-1])[::-1][: count // 2 + 1]
    squares = np.cumsum(values[::-1] ** 2)[::-1][: count // 2 + 1]
    variance = np.maximum(squares / left - (sums / left) ** 2, 0)
    result: NDArray[np.float64] = variance / left
    return result
