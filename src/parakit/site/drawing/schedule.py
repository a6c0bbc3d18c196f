"""Draw when each stage computes: the passes of one iteration, and the communication during each pass."""

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

_ROW_HEIGHT = 34
"""Height of a stage's row."""
_BOX_HEIGHT = 20
"""Height of the box of a pass."""
_MOST_PASSES = 24
"""The most micro batches that are drawn, unless the pipeline has more stages."""
_MOST_PASSES_WITH_MESSAGES = 40
"""The most passes with which messages between stages are drawn."""


def draw_schedule(spec: RunSpec, ranks: list[DrawnRank], name: str) -> str:
    """Return the sheet as SVG: a row per drawn stage with its passes, gradient sync and optimizer step.

    Args:
        spec: The run.
        ranks: The ranks to draw; a row is drawn for each of their stages.
        name: The prefix of the sheet's id.
    """
    sheet = Sheet(f"{name}-when", f"When each stage computes: {spec.model} as {spec.name}")
    split = spec.parallelism
    stages = sorted({rank.stage for rank in ranks})
    timeline = _simulate_drawn_part(spec)
    sheet.draw_text(0, 12, "one iteration", "title")
    sheet.y = 22
    start, end = 58, WIDTH - 74
    scale = (end - start) / timeline.length
    tops = {stage: sheet.y + _ROW_HEIGHT * row for row, stage in enumerate(stages)}
    for stage, top in tops.items():
        calls = rank_collectives(spec, stage)
        label = f"stage {stage}" if split.pipeline > 1 else "all ranks"
        sheet.draw_text(0, top + 14, label)
        sheet.draw_box(start, top, end - start, _BOX_HEIGHT, "idle")
        for event in timeline.events:
            if event.worker == stage:
                _draw_pass(sheet, event, start + scale * event.start, top, scale, calls)
        _draw_updates(sheet, calls, end + 6, top)
    draws_all_stages = len(stages) == split.pipeline
    if draws_all_stages and len(timeline.events) <= _MOST_PASSES_WITH_MESSAGES:
        _draw_messages(sheet, timeline, start, scale, tops)
    sheet.y += _ROW_HEIGHT * len(stages) + 2
    sheet.y += 13 * sheet.draw_wrapped_text(0, WIDTH, _describe_timing(spec, timeline), "q")
    return sheet.to_svg()


def _draw_updates(sheet: Sheet, calls: tuple[CollectiveCall, ...], x: float, top: float) -> None:
    """Draw the boxes of gradient sync and optimizer step to the right of a stage's passes, from `x` on."""
    for phase, label in ((Phase.GRADIENT_SYNC, "sync"), (Phase.OPTIMIZER, "step")):
        sheet.draw_box(x, top, 32, _BOX_HEIGHT, "update")
        sheet.draw_text(x + 16, top + 14, label, "pass", "middle")
        _draw_stripes(sheet, calls, phase, x, top + 21, 32)
        x += 35


def _simulate_drawn_part(spec: RunSpec) -> SimulatedSchedule:
    """Return the simulated schedule of the first micro batches, as many as the drawing has room for."""
    split = spec.parallelism
    most_micro_batches = max(split.pipeline, _MOST_PASSES // split.virtual_stages)
    # Interleaved schedules need a multiple of the number of stages.
    drawn = min(spec.microbatches, most_micro_batches - most_micro_batches % split.pipeline)
    return simulate_schedule(
        split.executed_schedule, split.pipeline, drawn, virtual=split.virtual_stages
    )


def _draw_pass(
    sheet: Sheet,
    event: Event,
    x: float,
    top: float,
    scale: float,
    calls: tuple[CollectiveCall, ...],
) -> None:
    """Draw one pass of a micro batch: a box with stripes below, and a label if there is room."""
    kind, letter, phase = "backward", "B", Phase.BACKWARD
    if event.step.direction is Pass.FORWARD:
        kind, letter, phase = "forward", "F", Phase.FORWARD
    number = event.step.microbatch + 1
    wide = scale * (event.end - event.start)
    box_width = wide - 0.7  # A gap separates neighbouring passes.
    sheet.begin_group(f"{kind} of micro batch {number}")
    sheet.draw_box(x, top, box_width, _BOX_HEIGHT, kind)
    label = f"{letter}{number}"
    if wide > 8 * len(label):
        sheet.draw_text(x + wide / 2, top + 14, label, "pass", "middle")
    sheet.end_group()
    _draw_stripes(sheet, calls, phase, x, top + 21, box_width)


def _draw_stripes(
    sheet: Sheet, calls: tuple[CollectiveCall, ...], phase: Phase, x: float, y: float, wide: float
) -> None:
    """Draw a stripe for each parallel dimension over which ranks send data in a phase.

    Small reductions are ignored.
    """
    sent = sum_bytes_by_group(
        call for call in calls if call.phase is phase and not is_small_reduction(call)
    )
    kinds = sorted({COLOURS[group] for group in sent if group in COLOURS})
    for column, kind in enumerate(kinds):
        sheet.draw_box(x + wide * column / len(kinds), y, wide / len(kinds), 4, f"dim {kind}")


def _draw_messages(
    sheet: Sheet, timeline: SimulatedSchedule, start: float, scale: float, tops: Mapping[int, float]
) -> None:
    """Draw an arrow from the end of each pass to the start of the same micro batch's pass on the next stage.

    Args:
        sheet: The sheet.
        timeline: The passes.
        start: The horizontal position of time 0.
        scale: Width per unit of time.
        tops: The top of each stage's row.
    """
    passes_by_micro_batch: dict[tuple[Pass, int], list[Event]] = {}
    for event in timeline.events:
        key = (event.step.direction, event.step.microbatch)
        passes_by_micro_batch.setdefault(key, []).append(event)
    for passes in passes_by_micro_batch.values():
        passes.sort(key=lambda event: event.start)
        for sender, receiver in pairwise(passes):
            if sender.worker == receiver.worker:
                continue
            # The arrow connects the edges of the two boxes that face each other.
            sender_y, receiver_y = tops[sender.worker], tops[receiver.worker]
            if sender_y < receiver_y:
                sender_y += _BOX_HEIGHT
            else:
                receiver_y += _BOX_HEIGHT
            sender_x, receiver_x = start + scale * sender.end, start + scale * receiver.start
            sheet.draw_line(sender_x, sender_y, receiver_x, receiver_y, "message", "end")


def _describe_timing(spec: RunSpec, timeline: SimulatedSchedule) -> str:
    """Return the sentences below the schedule: on the colours, the idle time, and how much of it is drawn."""
    text = (
        "F and B are forward and backward of a micro batch. B is drawn twice as long; no length is "
        "measured."
    )
    if spec.parallelism.pipeline > 1:
        idle = percent(measure_schedule(timeline).idle_fraction)
        text += f" Under {timeline.schedule.paper_name} stages idle {idle} of the time drawn."
    if timeline.microbatches < spec.microbatches:
        text += f" The first {timeline.microbatches:,} of {spec.microbatches:,} micro batches are drawn."
    return text
