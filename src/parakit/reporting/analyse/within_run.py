"""What changes while a run is on: its iteration time's steps, alternation and periodic slow iterations.

A step is where the median of the iterations before and after differ by more than they scatter, found
by binary segmentation with cumulative sums; the same on the differences of neighbours finds where
iterations begin to alternate. Slow iterations are periodic where most distances between them are equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from parakit.formatting.units import number
from parakit.logs import MAD_TO_SIGMA, Run, robust_spread

MIN_SEGMENT = 8
"""Iterations on either side of a step, and in a stretch that alternates."""
_LEAST = 0.02
"""Relative change of the time below which nothing is reported."""
_LEAST_SLOW = 0.1
"""A slow iteration takes so much longer than the median."""
_APART, _APART_OF_FEW = 2.0, 16.0
"""Spreads of single iterations by which a step must exceed them; and, over the iterations of the shorter
side, what is added: few that follow one another show too little of their scatter."""
_AROUND = 10
"""Iterations on either side that a slow one is compared with."""
_MAX_STEPS = 6
_MAX_POINTS = 20_000
"""Longer runs are looked at in blocks' medians, which keep the place to within a block."""

# Schedules of the learning rate and of what is written cost no time. In front stands the feature.
_OF_A_BEGINNING = re.compile(
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
"""Arguments that are a period, and the one without which nothing has it."""

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


class ChangeKind(StrEnum):
    """What a change is."""

    STEP = "step"
    ALTERNATING = "alternating"
    PERIODIC = "periodic"
    RAMP = "batch ramp-up"


@dataclass(frozen=True)
class ChangeWithinRun:
    """One change within a run."""

    kind: ChangeKind
    iteration: int
    """The first iteration after it; the first slow one of periodic ones."""
    text: str
    """A sentence's end: `from iteration 21 on …`."""
    share: float = 0.0
    """Of the run's time that it costs: of a step, of the time after it; negative where it gains."""


def find_changes_within_run(run: Run) -> tuple[ChangeWithinRun, ...]:
    """Everything that changes in a run's iteration times, in the order of the iterations."""
    table = run.log.iterations
    times = table.values("elapsed_ms")
    usable = (times > 0) & np.isfinite(times)
    usable &= ~(table.known("first_of_start") | table.known("averaged"))
    times, numbers = times[usable], table.numbers[usable]
    batches = table.values("global_batch_size")[usable]
    found: list[ChangeWithinRun] = []
    known = len(batches) and np.isfinite(batches).all()
    others = np.flatnonzero(batches != batches[-1]) if known else np.zeros(0, np.int64)
    if len(others):
        # Where the global batch grows, its end; what follows is of the last batch.
        start = int(others[-1]) + 1
        ends = (times[max(0, start - 8) : start], times[start:][:8])
        before, after = (number(float(np.median(part))) for part in ends)
        text = (
            f"the global batch grows from {batches[0]:.0f} to {batches[-1]:.0f} until iteration "
            f"{numbers[start]}, where an iteration's time goes from {before} to {after} ms"
        )
        found.append(ChangeWithinRun(ChangeKind.RAMP, int(numbers[start]), text))
        times, numbers = times[start:], numbers[start:]
    if len(times) < 2 * MIN_SEGMENT:
        return tuple(found)
    slow = _slow(times)
    found += [*_stretches(run, times, numbers, slow), *_periodic(run, times, numbers, slow)]
    return tuple(sorted(found, key=lambda shift: shift.iteration))


def _stretches(
    run: Run, times: Floats, numbers: Numbers, slow: NDArray[np.bool_]
) -> Iterator[ChangeWithinRun]:
    """Steps of the level, and stretches that alternate."""
    kept = np.flatnonzero(~slow)
    usual, at = times[kept], numbers[kept]
    # A difference belongs to the later of its two iterations.
    edges = [0]
    for bound in sorted({*_steps(usual), *(1 + cut for cut in _steps(np.abs(np.diff(usual))))}):
        if edges[-1] + MIN_SEGMENT <= bound <= len(usual) - MIN_SEGMENT:
            edges.append(bound)
    parts = [usual[a:b] for a, b in zip(edges, [*edges[1:], len(usual)], strict=True)]
    levels = [float(np.median(part)) for part in parts]
    pairs = [_alternates(part) for part in parts]
    for place, part in enumerate(parts):
        first, was, now = int(at[edges[place]]), levels[place - 1], levels[place]
        if (pair := pairs[place]) and not (place and pairs[place - 1]):
            where = f"from iteration {first} on" if place else "all along"
            text = (
                f"{where} iterations alternate between {number(pair[0])} and {number(pair[1])} ms"
            )
            text += f", before they took {number(was)} ms" if place else ""
            yield ChangeWithinRun(ChangeKind.ALTERNATING, first, text + _cause(run, first))
        elif place and _are_apart(parts[place - 1], part):
            share = 1 - was / now
            cost = f"which costs {share:.1%} of the time from there on"
            text = (
                f"from iteration {first} on iterations take {number(now)} ms instead of"
                f" {number(was)}, {abs(now / was - 1):.1%} {f'longer, {cost}' if share > 0 else 'less'}"
            )
            yield ChangeWithinRun(ChangeKind.STEP, first, text + _cause(run, first), share)


def _cause(run: Run, first: int) -> str:
    """What the log has near that iteration; empty where it has nothing.

    Last the argument that names it as a beginning or an end, of a feature that is on: Megatron prints
    every argument, so that one with its default says nothing by itself.
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
            return f' (the log says there: "{remark.text}")'
    arguments = _arguments(run)
    for name, value in arguments.items():
        found = _OF_A_BEGINNING.match(name) if value in (str(first), str(first - 1)) else None
        if found is None or ("cuda" in found["feature"] and run.device == "cpu"):
            continue
        # A switch of the feature is on, or its implementation is named.
        switches = re.compile(rf"(?:.*-)?{found['feature']}(?:-impl)?\Z")
        if any(switches.match(n) and each not in _OFF for n, each in arguments.items()):
            return f" (as --{name} {value} says)"
    return ""


def _arguments(run: Run) -> dict[str, str]:
    return {n.lstrip("-").replace("_", "-"): value for n, value in run.arguments.items()}


def _steps(values: Floats, depth: int = 0) -> list[int]:
    """Places at which the level of values changes for good, by binary segmentation."""
    count = len(values)
    if count < 2 * MIN_SEGMENT or depth >= _MAX_STEPS:
        return []
    block = max(1, count // _MAX_POINTS)
    coarse = np.median(values[: count // block * block].reshape(-1, block), axis=1)
    low, high = np.quantile(coarse, [0.02, 0.98])
    clipped = np.clip(coarse, low, high)
    sums = np.cumsum(clipped - clipped.mean())[:-1]
    places = np.arange(1, len(coarse))
    weight = np.sqrt(places * (len(coarse) - places) / len(coarse))
    usable = slice(MIN_SEGMENT - 1, len(coarse) - MIN_SEGMENT)
    found = np.abs(sums / weight)[usable]
    if not len(found):
        return []
    cut = (int(np.argmax(found)) + MIN_SEGMENT) * block
    if not _are_apart(values[:cut], values[cut:]):
        return []
    before, after = _steps(values[:cut], depth + 1), _steps(values[cut:], depth + 1)
    return [*before, cut, *(cut + place for place in after)]


def _are_apart(these: Floats, those: Floats, count: int | None = None) -> bool:
    """Whether two medians differ by more than single iterations scatter, of which there are so many.

    Alternating iterations scatter by half their distance, and are looked at apart.
    """
    count = count or min(len(these), len(those))
    one, two = float(np.median(these)), float(np.median(those))
    spreads = _APART + _APART_OF_FEW / count
    scatter = max(robust_spread(these), robust_spread(those))
    return abs(two - one) > max(_LEAST * min(one, two), spreads * scatter)


def _alternates(values: Floats) -> tuple[float, float] | None:
    """The two levels of neighbours that alternate, the lower first."""
    even, odd = values[::2], values[1::2]
    if len(values) < MIN_SEGMENT or not _are_apart(even, odd, len(values)):
        return None
    low, high = sorted((float(np.median(even)), float(np.median(odd))))
    return low, high


def _slow(times: Floats) -> NDArray[np.bool_]:
    """Iterations that stand out from those around them."""
    slow = np.zeros(len(times), dtype=bool)
    padded = np.pad(times, _AROUND, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * _AROUND + 1)
    # No median is below the least time, so that of most runs few are looked at.
    apart = np.flatnonzero(times > (1 + _LEAST_SLOW) * times.min())
    for start in range(0, len(apart), _MAX_POINTS):
        places = apart[start : start + _MAX_POINTS]
        around = windows[places]
        middle = np.median(around, axis=1)
        scatter = MAD_TO_SIGMA * np.median(np.abs(around - middle[:, None]), axis=1)
        slow[places] = times[places] > middle + np.maximum(5 * scatter, _LEAST_SLOW * middle)
    return slow


def _periodic(
    run: Run, times: Floats, numbers: Numbers, slow: NDArray[np.bool_]
) -> Iterator[ChangeWithinRun]:
    places = np.flatnonzero(slow)
    if len(places) < 3:
        return
    distances = np.diff(places)
    # A slow one that is missed, or one more between them, must not hide the period.
    period, count = Counter(distances.tolist()).most_common(1)[0]
    if period < 3 or count < 0.7 * len(distances):
        return
    slow_ones = numbers[places].tolist()
    usual = float(np.median(times[~slow]))
    extra = float(np.sum(times[places] - usual))
    share = extra / float(np.sum(times))
    every, long = int(np.median(np.diff(slow_ones))), float(np.median(times[places]))
    text = (
        f"every {every} iterations, from {slow_ones[0]} on, one takes {number(long)} ms instead of "
        f"{number(usual)} ({len(places)} of them, {share:.1%} of the time)"
        f"{_name_of_period(run, slow_ones, every)}"
    )
    yield ChangeWithinRun(ChangeKind.PERIODIC, slow_ones[0], text, share)


def _name_of_period(run: Run, slow: Sequence[int], every: int) -> str:
    """What the slow ones follow, else which argument has their period."""
    saved = {event.iteration for event in run.log.checkpoints}
    scored = {event.iteration for event in run.log.validation}
    for name, iterations in (("a checkpoint", saved), ("an evaluation", scored)):
        near = sum(n in iterations or n - 1 in iterations for n in slow)
        if near > len(slow) / 2:
            return f": they follow {name}"
    arguments = _arguments(run)
    for name, switch in _PERIODS.items():
        if arguments.get(name) == str(every) and arguments.get(switch, "") not in _OFF:
            return f": as often as --{name}"
    return "; the log does not say why (data loading or garbage collection look like this)"
