"""Find changes of the iteration time within a run: steps, alternation, slow iterations and a batch ramp.

A step is a change of the median by more than the scatter of single iterations; binary segmentation with
cumulative sums finds it. The same method on differences of neighbours finds where iterations begin to
alternate. Slow iterations are periodic if most distances between them are equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from parakit.formatting.units import number
from parakit.logs import MAD_TO_SIGMA, Run, robust_spread

MIN_SEGMENT = 8
"""Least number of iterations on either side of a step, and in a stretch that alternates."""
_MIN_CHANGE = 0.02
"""Relative change of the time below which no change is reported."""
_MIN_SLOWNESS = 0.1
"""Least excess of a slow iteration over the median around it, relative to that median."""
_MIN_SPREADS, _MIN_SPREADS_OF_FEW = 2.0, 16.0
"""Least size of a step in spreads of single iterations: the first number, plus the second one divided by the
iterations of the shorter side. Few consecutive iterations show too little of their scatter."""
_AROUND = 10
"""Iterations on either side with which a slow iteration is compared."""
_MAX_STEPS = 6
_MAX_POINTS = 20_000
"""Longer runs are reduced to medians of blocks, which locate a step to within a block."""

# Arguments that state where a feature begins or ends. Schedules of the learning rate and of saving are left
# out, because they cost no time.
_BEGINNING = re.compile(
    r"(?!lr-|save|eval|train|exit|log|tensorboard)(?=.*(?:iter|step))"
    r"(?P<feature>[a-z0-9-]+?)-(?:(?:iter|step)s?-)?(?:start|begin|end|after|warmup|freeze|delay|until)"
)
_OFF = ("", "0", "False", "None", "none")
_PERIODS = {
    "save-interval": "save",
    "eval-interval": "eval-iters",
    "manual-gc-interval": "manual-gc",
    "log-interval": "log-interval",
}
"""Arguments that state a period, with the argument that switches the periodic feature on."""

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


class ChangeKind(StrEnum):
    """Kind of a change within a run."""

    STEP = "step"
    ALTERNATING = "alternating"
    PERIODIC = "periodic"
    RAMP = "batch ramp-up"


@dataclass(frozen=True)
class ChangeWithinRun:
    """Change of the iteration time within a run."""

    kind: ChangeKind
    iteration: int
    """First iteration after the change; of periodic slow iterations the first one."""
    text: str
    """End of a sentence: `from iteration 21 on …`."""
    share: float = 0.0
    """Fraction of the run's time that the change costs, for a step of the time after it; negative for a gain."""


def find_changes_within_run(run: Run) -> tuple[ChangeWithinRun, ...]:
    """Return all changes of a run's iteration times in the order of the iterations."""
    table = run.log.iterations
    times = table.values("elapsed_ms")
    usable = (times > 0) & np.isfinite(times)
    usable &= ~(table.known("first_of_start") | table.known("averaged"))
    times, numbers = times[usable], table.numbers[usable]
    changes: list[ChangeWithinRun] = []
    ramp_end = _find_ramp_end(table.values("global_batch_size")[usable])
    if ramp_end:
        batches = table.values("global_batch_size")[usable]
        changes.append(_describe_ramp(times, numbers, batches, ramp_end))
        times, numbers = times[ramp_end:], numbers[ramp_end:]
    if len(times) < 2 * MIN_SEGMENT:
        return tuple(changes)
    is_slow = _find_slow_iterations(times)
    changes += _find_steps_and_alternation(run, times, numbers, is_slow)
    changes += _find_periodic_slowness(run, times, numbers, is_slow)
    return tuple(sorted(changes, key=lambda change: change.iteration))


def _find_ramp_end(batches: Floats) -> int:
    """Return the index of the first iteration with the final global batch; 0 without a batch ramp."""
    if not len(batches) or not np.isfinite(batches).all():
        return 0
    other_batches = np.flatnonzero(batches != batches[-1])
    return int(other_batches[-1]) + 1 if len(other_batches) else 0


def _describe_ramp(
    times: Floats, numbers: Numbers, batches: Floats, ramp_end: int
) -> ChangeWithinRun:
    """Return the change at the end of a batch-size ramp, with the median times before and after the end."""
    before = number(float(np.median(times[max(0, ramp_end - 8) : ramp_end])))
    after = number(float(np.median(times[ramp_end:][:8])))
    text = (
        f"the global batch grows from {batches[0]:.0f} to {batches[-1]:.0f} until iteration "
        f"{numbers[ramp_end]}, where an iteration's time goes from {before} to {after} ms"
    )
    return ChangeWithinRun(ChangeKind.RAMP, int(numbers[ramp_end]), text)


def _find_steps_and_alternation(
    run: Run, times: Floats, numbers: Numbers, is_slow: NDArray[np.bool_]
) -> Iterator[ChangeWithinRun]:
    """Yield each lasting change of the iteration time, and each stretch in which times alternate between two levels.

    Slow iterations are left out. If one stretch of alternating times follows another, only a clear change of its
    times is yielded, because the alternation is known already.
    """
    usual = np.flatnonzero(~is_slow)
    usual_times, usual_numbers = times[usual], numbers[usual]
    previous: Floats | None = None
    previous_alternates = False
    starts = _find_stretch_starts(usual_times)
    ends = [*starts[1:], len(usual_times)]
    for start, end in zip(starts, ends, strict=True):
        stretch = usual_times[start:end]
        first = int(usual_numbers[start])
        levels = _find_alternating_levels(stretch)
        if levels and not previous_alternates:
            before_ms = None if previous is None else float(np.median(previous))
            yield _describe_alternation(run, first, levels, before_ms)
        elif previous is not None and _differ_clearly(previous, stretch):
            before_ms, after_ms = float(np.median(previous)), float(np.median(stretch))
            yield _describe_step(run, first, before_ms, after_ms)
        previous, previous_alternates = stretch, levels is not None


def _find_stretch_starts(times: Floats) -> list[int]:
    """Return the indexes at which the level of the times, or the difference between neighbours, changes.

    The first index is 0. Each stretch has at least MIN_SEGMENT iterations; a change that is nearer to the one
    before, or to the end, is left out.
    """
    level_starts = _find_step_indexes(times)
    # A difference belongs to the later of its two iterations.
    difference_starts = [1 + index for index in _find_step_indexes(np.abs(np.diff(times)))]
    starts = [0]
    for start in sorted({*level_starts, *difference_starts}):
        if starts[-1] + MIN_SEGMENT <= start <= len(times) - MIN_SEGMENT:
            starts.append(start)
    return starts


def _describe_alternation(
    run: Run, first: int, levels: tuple[float, float], before_ms: float | None
) -> ChangeWithinRun:
    """Return a stretch from iteration `first` on in which times alternate, with the cause that the log shows.

    Args:
        run: The run.
        first: First iteration of the stretch.
        levels: The two times in milliseconds, the lower first.
        before_ms: Median time of the stretch before; None if the run begins with this stretch.
    """
    low, high = levels
    where = "all along" if before_ms is None else f"from iteration {first} on"
    text = f"{where} iterations alternate between {number(low)} and {number(high)} ms"
    if before_ms is not None:
        text += f", before they took {number(before_ms)} ms"
    text += _describe_cause(run, first)
    return ChangeWithinRun(ChangeKind.ALTERNATING, first, text)


def _describe_step(run: Run, first: int, before_ms: float, after_ms: float) -> ChangeWithinRun:
    """Return a lasting change of the iteration time at iteration `first`, with the cause that the log shows."""
    share = 1 - before_ms / after_ms
    direction = "less"
    if share > 0:
        direction = f"longer, which costs {share:.1%} of the time from there on"
    text = (
        f"from iteration {first} on iterations take {number(after_ms)} ms instead of"
        f" {number(before_ms)}, {abs(after_ms / before_ms - 1):.1%} {direction}"
    )
    text += _describe_cause(run, first)
    return ChangeWithinRun(ChangeKind.STEP, first, text, share)


def _describe_cause(run: Run, first: int) -> str:
    """Return, in brackets, the probable cause that the log shows near iteration `first`; empty without a cause.

    Arguments are considered last.
    """
    if first in run.restarts:
        return " (the run was resumed there)"
    near = range(first - 2, first + 1)
    for event in run.log.checkpoints:
        if event.iteration in near:
            return f" (a checkpoint was {event.action.replace('saving', 'saved')} there)"
    if any(event.iteration in near for event in run.log.validation):
        return " (an evaluation was there)"
    for remark in run.log.remarks:
        if first - 1 - (run.log.log_interval or 1) <= remark.after < first:
            return f' (the log has there: "{remark.text}")'
    return _describe_argument_as_cause(run, first)


def _describe_argument_as_cause(run: Run, first: int) -> str:
    """Return, in brackets, the argument that states iteration `first` as a beginning or an end; empty without any.

    An argument counts only if its feature is switched on. Megatron prints every argument, so a default value shows
    nothing.
    """
    arguments = _flag_values(run)
    for name, value in arguments.items():
        if value not in (str(first), str(first - 1)):
            continue
        match = _BEGINNING.match(name)
        if match is None:
            continue
        feature = match["feature"]
        is_for_other_device = "cuda" in feature and run.device == "cpu"
        if not is_for_other_device and _is_feature_on(feature, arguments):
            return f" (as --{name} {value} states)"
    return ""


def _is_feature_on(feature: str, arguments: Mapping[str, str]) -> bool:
    """Return True if a switch of the feature is on, or if its implementation is named."""
    switch = re.compile(rf"(?:.*-)?{feature}(?:-impl)?\Z")
    return any(switch.match(name) and value not in _OFF for name, value in arguments.items())


def _flag_values(run: Run) -> dict[str, str]:
    """Return a run's arguments by name with hyphens, such as `save-interval`."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in run.arguments.items()}


def _find_step_indexes(values: Floats, depth: int = 0) -> list[int]:
    """Return the indexes at which the level of values changes, found by binary segmentation.

    Args:
        values: The values.
        depth: Depth of the recursion, which is limited to _MAX_STEPS.
    """
    count = len(values)
    if count < 2 * MIN_SEGMENT or depth >= _MAX_STEPS:
        return []
    block = max(1, count // _MAX_POINTS)
    blocks = values[: count // block * block].reshape(-1, block)
    points = np.median(blocks, axis=1)
    # Outliers are clipped, because a single one would look like a step.
    low, high = np.quantile(points, [0.02, 0.98])
    clipped = np.clip(points, low, high)
    # At a step the cumulative sum is farthest from 0; the weight makes cuts near the ends comparable.
    sums = np.cumsum(clipped - clipped.mean())[:-1]
    cuts = np.arange(1, len(points))
    weight = np.sqrt(cuts * (len(points) - cuts) / len(points))
    usable = slice(MIN_SEGMENT - 1, len(points) - MIN_SEGMENT)
    strengths = np.abs(sums / weight)[usable]
    if not len(strengths):
        return []
    cut = (int(np.argmax(strengths)) + MIN_SEGMENT) * block
    if not _differ_clearly(values[:cut], values[cut:]):
        return []
    before = _find_step_indexes(values[:cut], depth + 1)
    after = _find_step_indexes(values[cut:], depth + 1)
    return [*before, cut, *(cut + index for index in after)]


def _differ_clearly(values: Floats, other_values: Floats, count: int | None = None) -> bool:
    """Return True if the medians of two stretches differ by more than single iterations scatter.

    Args:
        values: Times of one stretch.
        other_values: Times of the other stretch.
        count: Number of iterations that show the scatter; None takes those of the shorter stretch.
    """
    count = count or min(len(values), len(other_values))
    median, other_median = float(np.median(values)), float(np.median(other_values))
    spreads = _MIN_SPREADS + _MIN_SPREADS_OF_FEW / count
    scatter = max(robust_spread(values), robust_spread(other_values))
    least = max(_MIN_CHANGE * min(median, other_median), spreads * scatter)
    return abs(other_median - median) > least


def _find_alternating_levels(values: Floats) -> tuple[float, float] | None:
    """Return the two levels between which iterations alternate, the lower first; None if they do not."""
    even, odd = values[::2], values[1::2]
    if len(values) < MIN_SEGMENT or not _differ_clearly(even, odd, len(values)):
        return None
    low, high = sorted((float(np.median(even)), float(np.median(odd))))
    return low, high


def _find_slow_iterations(times: Floats) -> NDArray[np.bool_]:
    """Return a mask of the iterations that are much slower than those around them."""
    is_slow = np.zeros(len(times), dtype=bool)
    padded = np.pad(times, _AROUND, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * _AROUND + 1)
    # No median is below the least time, so in most runs few iterations have to be tested.
    candidates = np.flatnonzero(times > (1 + _MIN_SLOWNESS) * times.min())
    for start in range(0, len(candidates), _MAX_POINTS):
        indexes = candidates[start : start + _MAX_POINTS]
        around = windows[indexes]
        middle = np.median(around, axis=1)
        scatter = MAD_TO_SIGMA * np.median(np.abs(around - middle[:, None]), axis=1)
        limit = middle + np.maximum(5 * scatter, _MIN_SLOWNESS * middle)
        is_slow[indexes] = times[indexes] > limit
    return is_slow


def _find_periodic_slowness(
    run: Run, times: Floats, numbers: Numbers, is_slow: NDArray[np.bool_]
) -> Iterator[ChangeWithinRun]:
    """Yield one change for all slow iterations if they repeat with a period; otherwise yield nothing."""
    indexes = np.flatnonzero(is_slow)
    if len(indexes) < 3:
        return
    distances = np.diff(indexes)
    # One slow iteration that is missing, or one more between two others, must not hide the period.
    period, count = Counter(distances.tolist()).most_common(1)[0]
    if period < 3 or count < 0.7 * len(distances):
        return
    slow_numbers = numbers[indexes].tolist()
    usual_ms = float(np.median(times[~is_slow]))
    share = float(np.sum(times[indexes] - usual_ms)) / float(np.sum(times))
    period_in_numbers = int(np.median(np.diff(slow_numbers)))
    slow_ms = float(np.median(times[indexes]))
    text = (
        f"every {period_in_numbers} iterations, from {slow_numbers[0]} on, one takes"
        f" {number(slow_ms)} ms instead of {number(usual_ms)}"
        f" ({len(indexes)} of them, {share:.1%} of the time)"
        f"{_describe_cause_of_period(run, slow_numbers, period_in_numbers)}"
    )
    yield ChangeWithinRun(ChangeKind.PERIODIC, slow_numbers[0], text, share)


def _describe_cause_of_period(run: Run, slow: Sequence[int], period: int) -> str:
    """Return why every `period`-th iteration is slow, as the end of a sentence.

    The cause is a checkpoint or an evaluation if more than half of the slow iterations are at or directly after
    one. Otherwise the cause is the first of Megatron's arguments in `_PERIODS` that is switched on and has the
    value `period`. Without either, the text says that the log does not show the cause.
    """
    iterations_by_event = {
        "a checkpoint": {event.iteration for event in run.log.checkpoints},
        "an evaluation": {event.iteration for event in run.log.validation},
    }
    for event_name, iterations in iterations_by_event.items():
        num_following = sum(n in iterations or n - 1 in iterations for n in slow)
        if num_following > len(slow) / 2:
            return f": they follow {event_name}"
    arguments = _flag_values(run)
    for name, switch in _PERIODS.items():
        if arguments.get(name) == str(period) and arguments.get(switch, "") not in _OFF:
            return f": as often as --{name}"
    return "; the log does not show why (data loading or garbage collection look like this)"
