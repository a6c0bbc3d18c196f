"""When each stage computes: the passes of one iteration, with what is sent beside them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from parakit.config.run import RunSpec
from parakit.costs import (
    CollectiveCall,
    Event,
    Pass,
    Phase,
    SimulatedSchedule,
    measure_schedule,
    rank_collectives,
    simulate_schedule,
    sum_bytes_by_group,
)
from parakit.formatting.units import percent
from parakit.site.drawing.communication import COLOURS, is_small_reduction
from parakit.site.drawing.sheet import WIDTH, DrawnRank, Sheet

_MOST_PASSES = 24
_MOST_WITH_MESSAGES = 40


def draw_schedule(spec: RunSpec, ranks: list[DrawnRank], name: str) -> str:
    """The passes of each stage that is shown, with what is sent beside them."""
    sheet = Sheet(f"{name}-when", f"When each stage computes: {spec.model} as {spec.name}")
    split = spec.parallelism
    stages = sorted({rank.stage for rank in ranks})
    most = max(split.pipeline, _MOST_PASSES // split.virtual_stages)
    drawn = min(spec.microbatches, most - most % split.pipeline)
    virtual = split.virtual_stages
    timeline = simulate_schedule(split.executed_schedule, split.pipeline, drawn, virtual=virtual)
    sheet.text(0, 12, "one iteration", "title")
    sheet.y = 22
    start, end = 58, WIDTH - 74
    scale = (end - start) / timeline.length
    tops = {stage: sheet.y + 34 * place for place, stage in enumerate(stages)}
    for stage, top in tops.items():
        calls = rank_collectives(spec, stage)
        label = f"stage {stage}" if split.pipeline > 1 else "all ranks"
        sheet.text(0, top + 14, label)
        sheet.box(start, top, end - start, 20, "idle")
        for event in (event for event in timeline.events if event.worker == stage):
            _draw_pass(sheet, event, start + scale * event.start, top, scale, calls)
        for place, (phase, words) in enumerate(
            ((Phase.GRADIENT_SYNC, "sync"), (Phase.OPTIMIZER, "step"))
        ):
            x = end + 6 + 35 * place
            sheet.box(x, top, 32, 20, "update")
            sheet.text(x + 16, top + 14, words, "pass", "middle")
            _stripes(sheet, calls, phase, x, top + 21, 32)
    if len(stages) == split.pipeline and len(timeline.events) <= _MOST_WITH_MESSAGES:
        _messages(sheet, timeline, start, scale, tops)
    sheet.y += 34 * len(stages) + 2
    sheet.y += 13 * sheet.lines(0, WIDTH, _timing(spec, timeline), "q")
    return sheet.svg()


def _draw_pass(
    sheet: Sheet,
    event: Event,
    x: float,
    top: float,
    scale: float,
    calls: tuple[CollectiveCall, ...],
) -> None:
    is_forward, wide = event.step.direction is Pass.FORWARD, scale * (event.end - event.start)
    kind = "forward" if is_forward else "backward"
    sheet.open(f"{kind} of micro batch {event.step.microbatch + 1}")
    sheet.box(x, top, wide - 0.7, 20, kind)
    label = f"{'F' if is_forward else 'B'}{event.step.microbatch + 1}"
    if wide > 8 * len(label):
        sheet.text(x + wide / 2, top + 14, label, "pass", "middle")
    sheet.close()
    phase = Phase.FORWARD if is_forward else Phase.BACKWARD
    _stripes(sheet, calls, phase, x, top + 21, wide - 0.7)


def _stripes(
    sheet: Sheet, calls: tuple[CollectiveCall, ...], phase: Phase, x: float, y: float, wide: float
) -> None:
    """A stripe of each dimension over which something is sent in a phase."""
    sent = sum_bytes_by_group(
        call for call in calls if call.phase is phase and not is_small_reduction(call)
    )
    kinds = sorted({COLOURS[group] for group in sent if group in COLOURS})
    for place, kind in enumerate(kinds):
        sheet.box(x + wide * place / len(kinds), y, wide / len(kinds), 4, f"dim {kind}")


def _messages(
    sheet: Sheet, timeline: SimulatedSchedule, start: float, scale: float, tops: Mapping[int, float]
) -> None:
    """From the end of a pass to the beginning of the same on the stage that it sends to."""
    ordered: dict[tuple[Pass, int], list[Event]] = {}
    for event in timeline.events:
        ordered.setdefault((event.step.direction, event.step.microbatch), []).append(event)
    for events in ordered.values():
        for one, other in pairwise(sorted(events, key=lambda event: event.start)):
            if one.worker != other.worker:
                below = tops[one.worker] < tops[other.worker]
                sheet.line(
                    start + scale * one.end,
                    tops[one.worker] + (20 if below else 0),
                    start + scale * other.start,
                    tops[other.worker] + (0 if below else 20),
                    "message",
                    "end",
                )


def _timing(spec: RunSpec, timeline: SimulatedSchedule) -> str:
    every, drawn = spec.microbatches, timeline.microbatches
    only = f" The first {drawn:,} of {every:,} micro batches are drawn." if drawn < every else ""
    text = "F and B: forward and backward of a micro batch, B twice as long; lengths are no measurement."
    if spec.parallelism.pipeline > 1:
        idle = percent(measure_schedule(timeline).idle_fraction)
        text += f" Under {timeline.schedule.paper_name} stages idle {idle} of the time drawn."
    return text + only
