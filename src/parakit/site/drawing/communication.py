"""Draw what ranks send to each other: every call of an iteration, in the order of its phases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parakit.config.groups import Group
from parakit.config.run import RunSpec
from parakit.config.strategy import Parallelism
from parakit.costs import CollectiveCall, Operation, Phase, rank_collectives, total_wire_bytes
from parakit.formatting.units import count, gb, joined, megabytes
from parakit.site.drawing.sheet import (
    EXACT_BYTES,
    WIDTH,
    DrawnRank,
    Sheet,
    draw_rank_headings,
    group_ranks_by,
)

COLOURS = {
    Group.TENSOR: "tp",
    Group.CONTEXT: "cp",
    Group.DATA_CONTEXT: "dp",
    Group.EXPERT_DATA: "dp",
    Group.PIPELINE: "pp",
    Group.EMBEDDING: "pp",
    Group.EXPERT: "ep",
    Group.TENSOR_EXPERT: "ep",
    Group.EXPERT_TENSOR: "ep",
}
"""Classes of the page by group. The other groups move only a few numbers."""
_TEXT_WIDTH = 236
_SMALL_BYTES = 1024
_DIMENSIONS: dict[Group, tuple[str, ...]] = {
    Group.TENSOR: ("TP",),
    Group.CONTEXT: ("CP",),
    Group.TENSOR_CONTEXT: ("TP", "CP"),
    Group.DATA_CONTEXT: ("DP", "CP"),
    Group.PIPELINE: ("PP",),
    Group.EMBEDDING: ("both end stages",),
    Group.EXPERT: ("EP",),
    Group.EXPERT_DATA: ("DP of experts",),
    Group.EXPERT_TENSOR: ("TP of experts",),
    Group.TENSOR_EXPERT: ("TP of experts", "EP"),
}
"""Names of a group's dimensions, by group. Groups that move only a few numbers are left out."""


@dataclass(frozen=True)
class _CallLine:
    """Equal calls that the drawing shows in one line."""

    phase: Phase
    group: Group
    operation: Operation
    content: str
    """The content of the calls, in words."""
    calls: dict[int, list[CollectiveCall]]
    """The calls by pipeline stage."""


@dataclass(frozen=True)
class _RankContent:
    """The parts of a tensor that a rank has before or after a call."""

    kind: str
    """`share` for values that are still to be summed or exchanged, `full` for final values."""
    parts: int
    """The number of parts into which the tensor is cut."""
    held: Iterable[int]
    """Numbers of the parts that the rank has."""


@dataclass(frozen=True)
class _Arrow:
    """A line between two members of a group, by their indices in the group."""

    start: int
    end: int
    heads: str
    """The ends that have an arrow head: `end`, or `start end`."""


def _merge_calls(spec: RunSpec, stages: Iterable[int]) -> list[_CallLine]:
    """Return the calls of some stages as lines, in the order of the phases. Equal calls are merged into one line.

    All tensors of the batch share a line, and so do all small reductions.
    """
    lines: dict[tuple[Phase, Group, Operation, str], _CallLine] = {}
    for stage in stages:
        for call in rank_collectives(spec, stage):
            key = (call.phase, call.group, call.operation, call.description)
            if call.phase is Phase.DATA:
                key = (*key[:3], "the batch, which TP rank 0 reads")
            elif is_small_reduction(call):
                key = (call.phase, Group.WORLD, call.operation, "norm, loss, flags: a few numbers")
            line = lines.setdefault(key, _CallLine(*key, {}))
            line.calls.setdefault(stage, []).append(call)
    order = list(Phase)
    return sorted(lines.values(), key=lambda line: order.index(line.phase))


def draw_communication(spec: RunSpec, ranks: list[DrawnRank], name: str) -> str:
    """Return the sheet as SVG: one line per kind of call, with connections between the ranks that communicate.

    Args:
        spec: The run.
        ranks: The ranks to draw.
        name: The prefix of the sheet's id.
    """
    sheet = Sheet(f"{name}-sent", f"What is sent, between whom: {spec.model} as {spec.name}")
    column_width = (WIDTH - _TEXT_WIDTH) / len(ranks)
    draw_rank_headings(sheet, spec.parallelism, ranks, _TEXT_WIDTH, column_width)
    middles: dict[int, float] = {}
    for column, rank in enumerate(ranks):
        middles[rank.number] = _TEXT_WIDTH + column_width * (column + 0.5)
    phase, first_y = None, sheet.y
    for line in _merge_calls(spec, sorted({rank.stage for rank in ranks})):
        if line.phase is not phase:
            phase = line.phase
            sheet.draw_text(0, sheet.y + 12, phase.replace("_", " "), "title")
            sheet.y += 17
        top = sheet.y
        _draw_line_text(sheet, spec, line)
        middle_y = (top + sheet.y) / 2 - 3
        box_width = min(column_width - 4, 40)
        _draw_groups(sheet, line, ranks, middles, box_width, middle_y)
    for x in middles.values():
        sheet.draw_background_line(x, first_y)
    return sheet.to_svg()


def _draw_line_text(sheet: Sheet, spec: RunSpec, line: _CallLine) -> None:
    """Draw the text of a line, and move the sheet's `y` below it: operation and group, content, and amounts."""
    operation = line.operation.replace("_", "-")
    heading = operation + _describe_group(spec.parallelism, line.group)
    for text, kind in ((heading, "b"), (line.content, ""), (_describe_amounts(line), "q")):
        num_lines = sheet.draw_wrapped_text(0, _TEXT_WIDTH - 6, text, kind)
        sheet.y += 13 * num_lines
    sheet.y += 6


def _describe_group(split: Parallelism, group: Group) -> str:
    """Return ` over TP and CP`: the dimensions of a group that are above 1; empty without any."""
    degrees = {"TP": split.tensor, "CP": split.context, "DP": split.data, "EP": split.expert}
    degrees["TP of experts"] = split.effective_expert_tensor
    # A dimension that has no degree here, such as PP, is only used if it is above 1.
    names = [name for name in _DIMENSIONS.get(group, ()) if degrees.get(name, 2) > 1]
    return f" over {joined(names)}" if names else ""


def _describe_amounts(line: _CallLine) -> str:
    """Return a text with the number and size of the calls, and the bytes that a rank sends.

    If the stages differ, the text lists them one by one.
    """
    texts = {}
    for stage, calls in line.calls.items():
        num_calls, wire_bytes = sum(call.calls for call in calls), total_wire_bytes(calls)
        sizes = {call.payload_bytes for call in calls}
        text = f"{num_calls:,} calls"
        if len(sizes) == 1:
            text = f"{num_calls:,} × {format_traffic(sizes.pop())}"
        texts[stage] = f"{text}, a rank sends {format_traffic(wire_bytes)}"
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"stage {stage}: {text}" for stage, text in texts.items())


def _draw_groups(
    sheet: Sheet,
    line: _CallLine,
    ranks: list[DrawnRank],
    middles: dict[int, float],
    wide: float,
    y: float,
) -> None:
    """Draw arrows between the ranks of each group, with each rank's content before the call above and after it below.

    Args:
        sheet: The sheet.
        line: The calls.
        ranks: The ranks that are drawn.
        middles: The horizontal middle of each rank's column, by rank.
        wide: The width of a content's box.
        y: The vertical middle of the line.
    """
    kind = f"dim {COLOURS.get(line.group, 'few')}"
    is_send = line.operation is Operation.SEND
    participants = ranks
    if not is_send:
        participants = [rank for rank in ranks if rank.stage in line.calls]
    groups = group_ranks_by(line.group, participants)
    lanes = _assign_lanes(groups)
    for members, lane in zip(groups, lanes, strict=True):
        xs = [middles[rank.number] for rank in members]
        # Lanes are four units apart, and lie around the middle of the line.
        lane_y = y + 4 * lane - 2 * max(lanes)
        arrows = _list_arrows(line, members)
        for arrow in arrows:
            sheet.draw_line(xs[arrow.start], lane_y, xs[arrow.end], lane_y, kind, arrow.heads)
        receivers = {arrow.end for arrow in arrows}
        for index, rank in enumerate(members):
            before, after = _contents_of_rank(line.operation, index, len(members))
            sent_bytes = total_wire_bytes(line.calls.get(rank.stage, []))
            if sent_bytes:
                title = f"rank {rank.number} sends {count(sent_bytes)} bytes"
                sheet.begin_group(title, rank=rank.number, sends=sent_bytes)
                _draw_content(sheet, xs[index], y - 17, wide, before, kind)
                sheet.end_group()
            receives = index in receivers or not is_send
            if receives:
                _draw_content(sheet, xs[index], y + 9, wide, after, kind)


def _assign_lanes(groups: list[list[DrawnRank]]) -> list[int]:
    """Return the lane in which each group of ranks is drawn, counted from 0.

    Groups in one lane do not overlap horizontally. Each group gets the first lane that is free at its first rank.
    The ranks within a group, and the groups by their first rank, must be in ascending order.
    """
    lanes: list[int] = []
    last_rank_by_lane: list[int] = []
    for members in groups:
        first, last = members[0].number, members[-1].number
        for lane, lane_end in enumerate(last_rank_by_lane):
            if lane_end < first:
                last_rank_by_lane[lane] = last
                break
        else:
            lane = len(last_rank_by_lane)
            last_rank_by_lane.append(last)
        lanes.append(lane)
    return lanes


def _draw_content(
    sheet: Sheet, middle: float, y: float, wide: float, content: _RankContent, kind: str
) -> None:
    """Draw a frame for the full tensor, and fill the parts that a rank has."""
    left_edge = middle - wide / 2
    sheet.draw_box(left_edge, y, wide, 8, "whole")
    for part in content.held:
        x = left_edge + wide * part / content.parts
        sheet.draw_box(x, y, wide / content.parts, 8, f"{content.kind} {kind}")


def _list_arrows(line: _CallLine, members: list[DrawnRank]) -> list[_Arrow]:
    """Return the arrows of a group: one per sender for sends, and one over all members for a collective.

    A collective of a single member has no arrow.
    """
    if line.operation is not Operation.SEND:
        if len(members) == 1:
            return []
        heads = "end" if line.operation is Operation.BROADCAST else "start end"
        return [_Arrow(0, len(members) - 1, heads)]
    goes_backward = line.group is Group.PIPELINE and line.phase is Phase.BACKWARD
    step = -1 if goes_backward else 1
    senders = [index for index, rank in enumerate(members) if rank.stage in line.calls]
    return [_Arrow(index, (index + step) % len(members), "end") for index in senders]


def _contents_of_rank(
    operation: Operation, index: int, members: int
) -> tuple[_RankContent, _RankContent]:
    """Return what one member of a group has before an operation, and what it has afterwards.

    `index` is the index of the member, and `members` is the number of members.
    """
    addend = _RankContent("share", 1, (0,))
    full = _RankContent("full", 1, (0,))
    shard = _RankContent("full", members, (index,))
    only_first = _RankContent("full", 1, (0,) if index == 0 else ())
    contents: dict[Operation, tuple[_RankContent, _RankContent]] = {
        Operation.ALL_REDUCE: (addend, full),
        Operation.REDUCE_SCATTER: (addend, shard),
        Operation.ALL_GATHER: (shard, full),
        Operation.BROADCAST: (only_first, full),
        Operation.SEND: (full, full),
    }
    every_part = range(members)
    exchanged = (
        _RankContent("share", members, every_part),
        _RankContent("full", members, every_part),
    )
    return contents.get(operation, exchanged)


def is_small_reduction(call: CollectiveCall) -> bool:
    """Return True for the small reductions at the end of an iteration, which are drawn as one line."""
    return call.phase is Phase.OPTIMIZER and call.payload_bytes <= _SMALL_BYTES


def format_traffic(size_bytes: int) -> str:
    """Return bytes with all digits if they are few, else in MB or GB, which are decimal as for networks."""
    if size_bytes < EXACT_BYTES:
        return f"{count(size_bytes)} B"
    return megabytes(size_bytes) if size_bytes < 10**9 else f"{gb(size_bytes)} GB"
