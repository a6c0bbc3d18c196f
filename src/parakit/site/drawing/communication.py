"""What is sent between whom: every call of an iteration, in the order of its phases."""

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
"""Classes of what is sent over a group; the other groups move a few numbers."""
_TEXT = 236
_FEW_BYTES = 1024
_OVER: dict[Group, tuple[str, ...]] = {
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
"""The dimensions of each group that moves more than a few numbers."""


@dataclass(frozen=True)
class _Sent:
    """Calls that one line shows, by the stage that makes them."""

    phase: Phase
    group: Group
    operation: Operation
    what: str
    calls: dict[int, list[CollectiveCall]]


_Content = tuple[str, int, Iterable[int]]
"""Class, parts of the whole, and those that are there."""


def _lines(spec: RunSpec, stages: Iterable[int]) -> list[_Sent]:
    """Every call of these stages, equal ones together; so are the batch's tensors and a few numbers."""
    found: dict[tuple[Phase, Group, Operation, str], _Sent] = {}
    for stage in stages:
        for call in rank_collectives(spec, stage):
            key = (call.phase, call.group, call.operation, call.description)
            if call.phase is Phase.DATA:
                key = (*key[:3], "the batch, which TP rank 0 reads")
            elif is_small_reduction(call):
                key = (call.phase, Group.WORLD, call.operation, "norm, loss, flags: a few numbers")
            found.setdefault(key, _Sent(*key, {})).calls.setdefault(stage, []).append(call)
    order = list(Phase)
    return sorted(found.values(), key=lambda line: order.index(line.phase))


def draw_communication(spec: RunSpec, ranks: list[DrawnRank], name: str) -> str:
    """The sheet: a line for each kind of call, a thread for each rank, joined where they communicate."""
    sheet = Sheet(f"{name}-sent", f"What is sent, between whom: {spec.model} as {spec.name}")
    wide = (WIDTH - _TEXT) / len(ranks)
    draw_rank_headings(sheet, spec.parallelism, ranks, _TEXT, wide)
    middles = {rank.number: _TEXT + wide * (place + 0.5) for place, rank in enumerate(ranks)}
    phase, first = None, sheet.y
    for line in _lines(spec, sorted({rank.stage for rank in ranks})):
        if line.phase is not phase:
            phase = line.phase
            sheet.text(0, sheet.y + 12, phase.replace("_", " "), "title")
            sheet.y += 17
        top = sheet.y
        heading = line.operation.replace("_", "-") + _over(spec.parallelism, line.group)
        sheet.y += 13 * sheet.lines(0, _TEXT - 6, heading, "b")
        sheet.y += 13 * sheet.lines(0, _TEXT - 6, line.what)
        sheet.y += 13 * sheet.lines(0, _TEXT - 6, _amounts(line), "q") + 6
        _link(sheet, line, ranks, middles, min(wide - 4, 40), (top + sheet.y) / 2 - 3)
    for x in middles.values():
        sheet.thread(x, first)
    return sheet.svg()


def _over(split: Parallelism, group: Group) -> str:
    degrees = {"TP": split.tensor, "CP": split.context, "DP": split.data, "EP": split.expert}
    degrees["TP of experts"] = split.effective_expert_tensor
    words = [word for word in _OVER.get(group, ()) if degrees.get(word, 2) > 1]
    return f" over {joined(words)}" if words else ""


def _amounts(line: _Sent) -> str:
    said = {}
    for stage, calls in line.calls.items():
        times, wire = sum(call.calls for call in calls), total_wire_bytes(calls)
        sizes = {call.payload_bytes for call in calls}
        each = (
            f"{times:,} × {format_traffic(sizes.pop())}" if len(sizes) == 1 else f"{times:,} calls"
        )
        said[stage] = f"{each}, a rank sends {format_traffic(wire)}"
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"stage {stage}: {text}" for stage, text in said.items())


def _link(
    sheet: Sheet,
    line: _Sent,
    ranks: list[DrawnRank],
    middles: dict[int, float],
    wide: float,
    y: float,
) -> None:
    """Each group's ranks joined, with what each has before (above the line) and after (below it)."""
    kind = f"dim {COLOURS.get(line.group, 'few')}"
    is_sent = line.operation is Operation.SEND
    taking = ranks if is_sent else [rank for rank in ranks if rank.stage in line.calls]
    groups = group_ranks_by(line.group, taking)
    lanes = _lanes(groups)
    for members, lane in zip(groups, lanes, strict=True):
        xs = [middles[rank.number] for rank in members]
        height = y + 4 * lane - 2 * max(lanes)
        ways = _ways(line, members)
        for start, end, arrows in ways:
            sheet.line(xs[start], height, xs[end], height, kind, arrows)
        receivers = {end for _, end, _ in ways}
        for place, rank in enumerate(members):
            before, after = _contents(line.operation, place, len(members))
            wire = total_wire_bytes(line.calls.get(rank.stage, []))
            if wire:
                sheet.open(
                    f"rank {rank.number} sends {count(wire)} bytes", rank=rank.number, sends=wire
                )
                _content(sheet, xs[place], y - 17, wide, before, kind)
                sheet.close()
            if place in receivers or not is_sent:
                _content(sheet, xs[place], y + 9, wide, after, kind)


def _lanes(groups: list[list[DrawnRank]]) -> list[int]:
    """Of each group the first lane in which it meets none before it."""
    found: list[int] = []
    ends: list[int] = []
    for members in groups:
        first = members[0].number
        lane = next((place for place, end in enumerate(ends) if end < first), len(ends))
        ends[lane : lane + 1] = [members[-1].number]
        found.append(lane)
    return found


def _content(
    sheet: Sheet, middle: float, y: float, wide: float, content: _Content, kind: str
) -> None:
    state, parts, held = content
    sheet.box(middle - wide / 2, y, wide, 8, "whole")
    for part in held:
        sheet.box(middle - wide / 2 + wide * part / parts, y, wide / parts, 8, f"{state} {kind}")


def _ways(line: _Sent, members: list[DrawnRank]) -> list[tuple[int, int, str]]:
    """Lines from a member's place to another's, and their arrows."""
    last = len(members) - 1
    if line.operation is not Operation.SEND:
        both = "end" if line.operation is Operation.BROADCAST else "start end"
        return [(0, last, both)] if last else []
    step = -1 if line.group is Group.PIPELINE and line.phase is Phase.BACKWARD else 1
    senders = [place for place, rank in enumerate(members) if rank.stage in line.calls]
    return [(place, (place + step) % len(members), "end") for place in senders]


def _contents(operation: Operation, place: int, members: int) -> tuple[_Content, _Content]:
    """What a rank has before and after: `share` is to be summed or exchanged, `full` is a value."""
    share, whole, part = ("share", 1, (0,)), ("full", 1, (0,)), ("full", members, (place,))
    known: dict[Operation, tuple[_Content, _Content]] = {
        Operation.ALL_REDUCE: (share, whole),
        Operation.REDUCE_SCATTER: (share, part),
        Operation.ALL_GATHER: (part, whole),
        Operation.BROADCAST: (("full", 1, (0,) if place == 0 else ()), whole),
        Operation.SEND: (whole, whole),
    }
    every = range(members)
    return known.get(operation, (("share", members, every), ("full", members, every)))


def is_small_reduction(call: CollectiveCall) -> bool:
    """Whether it is one of the small reductions at an iteration's end, which are drawn as one."""
    return call.phase is Phase.OPTIMIZER and call.payload_bytes <= _FEW_BYTES


def format_traffic(size_bytes: int) -> str:
    """Bytes as networks count them."""
    if size_bytes < EXACT_BYTES:
        return f"{count(size_bytes)} B"
    return megabytes(size_bytes) if size_bytes < 10**9 else f"{gb(size_bytes)} GB"
