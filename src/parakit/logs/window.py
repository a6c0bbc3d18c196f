"""Which iteration lines of a log are measurements, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parakit.logs.iterations import IterationTable
from parakit.logs.scraped import ScrapedLog

MIN_FOR_WARM_UP = 8
"""Fewer samples than this show no trend above the noise."""
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True)
class Window:
    """The samples that count."""

    samples_ms: tuple[float, ...] = ()
    iterations: tuple[int, ...] = ()
    """The iteration of each sample."""
    global_batch_size: int | None = None
    """Of every sample; None where the lines name none."""
    dropped: tuple[tuple[str, int], ...] = ()
    """Why lines do not count, and how many, in the order of the rules."""

    @property
    def text(self) -> str:
        """Window, sample count and what was left out, as text."""
        span, numbers = "no samples", self.iterations
        if self.samples_ms:
            span = f"{len(numbers)} samples, iterations {numbers[0]} to {numbers[-1]}"
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.dropped)
        return f"{span}; left out: {left_out}" if left_out else span


def select_window(log: ScrapedLog) -> Window:
    """Choose the lines whose time is that of a settled, whole iteration.

    Known traps go first (first line after a start, the averaged second one, the line after an
    evaluation or a checkpoint, skipped steps, another batch size), then warm-up as the data shows
    it. Pauses that would take more than half of the lines are kept: then they are the run's normal
    state.
    """
    lines = log.iterations
    left = np.ones(len(lines), np.bool_)
    counts: list[tuple[int, str, int]] = []

    def leave_out(reason: str, trapped: NDArray[np.bool_]) -> None:
        trapped = trapped & left
        if trapped.any():
            counts.append((int(np.argmax(trapped)), reason, int(trapped.sum())))
            left[trapped] = False

    # Of several reasons the first is given.
    times, paused = lines.values("elapsed_ms"), lines.known("after_pause")
    leave_out("without a time", ~(np.isfinite(times) & (times > 0)))
    leave_out("first after a start", lines.known("first_of_start"))
    leave_out("averaged over two iterations", lines.known("averaged"))
    leave_out("after an evaluation or checkpoint", paused & (paused.sum() <= len(lines) / 2))
    leave_out("skipped steps", lines.values("skipped_iterations") > 0)
    batch = _usual_batch(lines, left)
    if batch is not None:
        leave_out("at another global batch size", lines.values("global_batch_size") != batch)
    warm_up = count_warm_up_samples(times[left])
    counts.sort(key=lambda each: each[0])
    return Window(
        tuple(times[left][warm_up:].tolist()),
        tuple(lines.numbers[left][warm_up:].tolist()),
        batch,
        (*(each[1:] for each in counts), *[("warm-up", warm_up)] * (warm_up > 0)),
    )


def count_warm_up_samples(samples: Sequence[float] | NDArray[np.float64]) -> int:
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
    # Squared standard error of the mean of what a cut of up to half leaves.
    left = count - np.arange(count // 2 + 1)
    sums = np.cumsum(clipped[::-1])[::-1][: count // 2 + 1]
    squares = np.cumsum(clipped[::-1] ** 2)[::-1][: count // 2 + 1]
    cut = int(np.argmin(np.maximum(squares / left - (sums / left) ** 2, 0) / left))
    if cut == 0 or abs(float(np.median(values[:cut])) - middle) <= 2 * spread:
        return 0
    return cut


def robust_spread(values: NDArray[np.float64]) -> float:
    """Standard deviation as estimated from the median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def _usual_batch(lines: IterationTable, left: NDArray[np.bool_]) -> int | None:
    """The global batch size of most lines, of two with as many the later one: where it ramps up, times
    of different batches are not of one thing."""
    sizes = lines.values("global_batch_size")
    known = sizes > 0
    sizes = sizes[left & known] if (left & known).any() else sizes[known]
    found, counts = np.unique(sizes, return_counts=True)
    last = [int(np.flatnonzero(sizes == size)[-1]) for size in found]
    best = max(zip(counts.tolist(), last, found.tolist(), strict=True), default=None)
    return int(best[2]) if best else None
