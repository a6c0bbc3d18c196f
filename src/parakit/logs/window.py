"""Select the iteration lines of a log that are measurements of time, and say why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parakit.logs.iterations import IterationTable
from parakit.logs.scraped import ScrapedLog

MIN_FOR_WARM_UP = 8
"""Fewest samples in which a warm-up is searched. Fewer show no trend above the noise."""
MAD_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""


@dataclass(frozen=True)
class Window:
    """Iteration times of a run that are used as samples, and the reasons why other lines are not used."""

    samples_ms: tuple[float, ...] = ()
    iterations: tuple[int, ...] = ()
    """The iteration of each sample."""
    global_batch_size: int | None = None
    """Global batch size of every sample; None if the lines do not state it."""
    dropped: tuple[tuple[str, int], ...] = ()
    """Reasons why lines do not count, with the number of lines, in the order of the log."""

    @property
    def text(self) -> str:
        """Sentence on the number of samples, their iterations, and the lines that were left out."""
        span = "no samples"
        if self.samples_ms:
            first, last = self.iterations[0], self.iterations[-1]
            span = f"{len(self.iterations)} samples, iterations {first} to {last}"
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.dropped)
        return f"{span}; left out: {left_out}" if left_out else span


@dataclass
class _LineSelection:
    """Lines that still count, and the reasons why others were left out."""

    is_selected: NDArray[np.bool_]
    reasons: list[tuple[int, str, int]]
    """First line, reason and number of lines of each reason."""

    def leave_out(self, reason: str, lines: NDArray[np.bool_]) -> None:
        """Leave out lines for a reason. Lines that were left out before keep their first reason."""
        lines = lines & self.is_selected
        if lines.any():
            self.reasons.append((int(np.argmax(lines)), reason, int(lines.sum())))
            self.is_selected[lines] = False


def select_window(log: ScrapedLog) -> Window:
    """Return the iteration times of a log that measure complete iterations after the warm-up.

    These lines are left out: lines without a time, the first line after a start, an averaged second line, lines
    after an evaluation or a checkpoint, skipped steps, lines of another batch size, and finally the warm-up that
    the data shows. Lines after a pause are used if more than half of all lines are such lines, because pauses are
    then normal.
    """
    lines = log.iterations
    selection = _LineSelection(np.ones(len(lines), np.bool_), reasons=[])
    times, is_after_pause = lines.values("elapsed_ms"), lines.known("after_pause")
    is_pause_rare = is_after_pause.sum() <= len(lines) / 2
    selection.leave_out("without a time", ~(np.isfinite(times) & (times > 0)))
    selection.leave_out("first after a start", lines.known("first_of_start"))
    selection.leave_out("averaged over two iterations", lines.known("averaged"))
    selection.leave_out("after an evaluation or checkpoint", is_after_pause & is_pause_rare)
    selection.leave_out("skipped steps", lines.values("skipped_iterations") > 0)
    batch = _find_usual_batch_size(lines, selection.is_selected)
    if batch is not None:
        is_other_batch = lines.values("global_batch_size") != batch
        selection.leave_out("at another global batch size", is_other_batch)
    selected_times = times[selection.is_selected]
    selected_numbers = lines.numbers[selection.is_selected]
    warm_up = count_warm_up_samples(selected_times)
    selection.reasons.sort(key=lambda first_and_reason: first_and_reason[0])
    dropped = [(reason, count) for _, reason, count in selection.reasons]
    if warm_up:
        dropped.append(("warm-up", warm_up))
    return Window(
        samples_ms=tuple(selected_times[warm_up:].tolist()),
        iterations=tuple(selected_numbers[warm_up:].tolist()),
        global_batch_size=batch,
        dropped=tuple(dropped),
    )


def count_warm_up_samples(samples: Sequence[float] | NDArray[np.float64]) -> int:
    """Return the number of leading samples that belong to the warm-up, at most half of all samples.

    The method is MSER (White 1997): it finds the cut after which the mean of the remaining samples has the
    smallest standard error. The result is 0 unless the median of the samples before the cut clearly differs from
    the settled median, so that noise alone removes nothing. Fewer than MIN_FOR_WARM_UP samples also give 0.
    """
    count = len(samples)
    if count < MIN_FOR_WARM_UP:
        return 0
    values = np.asarray(samples, dtype=float)
    settled = values[count // 2 :]
    settled_median, spread = float(np.median(settled)), robust_spread(settled)
    # Values are clipped, so that one outlier late in the run does not decide where the warm-up ends.
    limit = max(5 * spread, 1e-9 * abs(settled_median))
    clipped = np.clip(values, settled_median - limit, settled_median + limit)
    # Squared standard error of the mean of the remaining samples, for each cut of up to half.
    num_remaining = count - np.arange(count // 2 + 1)
    sums = np.cumsum(clipped[::-1])[::-1][: count // 2 + 1]
    squares = np.cumsum(clipped[::-1] ** 2)[::-1][: count // 2 + 1]
    variances = np.maximum(squares / num_remaining - (sums / num_remaining) ** 2, 0)
    cut = int(np.argmin(variances / num_remaining))
    if cut == 0 or abs(float(np.median(values[:cut])) - settled_median) <= 2 * spread:
        return 0
    return cut


def robust_spread(values: NDArray[np.float64]) -> float:
    """Return the standard deviation, estimated from the median absolute deviation."""
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def _find_usual_batch_size(lines: IterationTable, is_selected: NDArray[np.bool_]) -> int | None:
    """Return the global batch size of most selected lines; None if no line states a batch size.

    If two sizes have equally many lines, the size that comes last in the log is returned. The batch may grow
    during a run, and times of different batch sizes are not comparable.
    """
    sizes = lines.values("global_batch_size")
    has_size = sizes > 0
    if (is_selected & has_size).any():
        has_size &= is_selected
    sizes = sizes[has_size]
    distinct_sizes, counts = np.unique(sizes, return_counts=True)
    last_positions = [int(np.flatnonzero(sizes == size)[-1]) for size in distinct_sizes]
    candidates = zip(counts.tolist(), last_positions, distinct_sizes.tolist(), strict=True)
    best = max(candidates, default=None)
    return int(best[2]) if best else None
