"""What each strategy sends, why that much, and how tensor, sequence and context parallelism compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tools.records.measurements import Phase
from tools.report.analyse.time_shares import mean
from tools.report.explain.predicted import CallComparison, CallRow
from tools.report.explain.subjects import Subject, find
from tools.text.units import DASH, amount, count, joined

_LARGEST = 3
"""Groups of calls that are named in a sentence."""
_SMALLEST_SHARE = 0.01
"""Of what a rank sends; smaller groups of calls are in the table only."""
_NAMED = 3
_INSIDE = (Phase.FORWARD, Phase.BACKWARD)


def traffic_sentences(subjects: Sequence[Subject]) -> list[str]:
    """What every configuration of several ranks sends, beside its closed form."""
    return [_sent(s) for s in subjects if s.split.world_size > 1]


def context_sentences(subjects: Sequence[Subject]) -> list[str]:
    """Context parallelism beside tensor parallelism of the same ranks and batch."""
    found = []
    for subject in subjects:
        split = subject.split
        if split.context == 1:
            continue
        tensor = replace(split, context=1, tensor=split.tensor * split.context)
        others = [
            other
            for sequence in (False, True)
            if (wanted := replace(tensor, sequence_parallel=sequence))
            and (other := find(subjects, subject, wanted, same_batch=True))
        ]
        found += [_against(subject, other) for other in others]
        if others:
            found.append(_limits(subject))
    return found


def _sent(subject: Subject) -> str:
    calls = subject.evidence.calls
    if not calls:
        return f"{subject.label}: no communication ledger, so what it sends is not known."
    rank = max(calls, key=lambda comparison: comparison.measured_wire_bytes)
    made = sum(row.measured_calls for row in rank.rows)
    worth = _SMALLEST_SHARE * rank.measured_wire_bytes
    rows = [row for row in rank.rows if row.measured_wire_bytes > worth]
    rows = sorted(rows, key=lambda row: -row.measured_wire_bytes)[:_LARGEST]
    parts = [
        f"{amount(row.measured_wire_bytes)} in {count(row.measured_calls)} {row.operation} of "
        f"{row.group} ({_what(row)})"
        for row in rows
    ]
    return (
        f"{subject.label}: rank {rank.rank} sends {amount(rank.measured_wire_bytes)} in {count(made)} "
        f"calls an iteration: {joined(parts)}. {_verdict(calls, rank)}"
    )


def _what(row: CallRow) -> str:
    names = row.what.split("; ") if row.what else ["in no closed form"]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _verdict(calls: Sequence[CallComparison], rank: CallComparison) -> str:
    left = [item for comparison in calls for item in comparison.unattributed]
    if not left:
        return (
            f"Every call of every rank is in the closed form; it has {count(rank.predicted_wire_bytes)} "
            f"bytes for this rank, the ledger {count(rank.measured_wire_bytes)}."
        )
    parts = [
        f"{abs(item.calls)} {item.operation} of {item.group} with {count(item.payload_bytes)} bytes "
        f"{'made and in no closed form' if item.calls > 0 else 'predicted and not made'}"
        for item in left[:_LARGEST]
    ]
    more = f", and {len(left) - _LARGEST} more kinds" if len(left) > _LARGEST else ""
    return f"Not attributed: {joined(parts)}{more}."


def _against(subject: Subject, other: Subject) -> str:
    ours, theirs = _inside_layers(subject), _inside_layers(other)
    if ours is None or theirs is None:
        return f"{subject.label} against {other.label}: a communication ledger is missing."
    fewer = "less" if ours[0] < theirs[0] else "more"
    ratio = ours[0] / theirs[0] if theirs[0] else float("inf")
    exposed = [
        f"{share:.0%}" if share is not None else DASH for share in map(_exposed, (subject, other))
    ]
    return (
        f"{subject.label} against {other.label}, in forward and backward: {amount(ours[0])} instead of "
        f"{amount(theirs[0])} on the wire (×{ratio:.2f}, {fewer}), in {count(ours[1])} instead of "
        f"{count(theirs[1])} calls; waiting for them is {exposed[0]} instead of {exposed[1]} of "
        f"the iteration. The gradients it also has to sum add {amount(ours[2])}; {other.label} sums "
        f"{amount(theirs[2])}."
    )


def _limits(subject: Subject) -> str:
    configuration = subject.evidence.configuration
    gathered = configuration is not None and configuration.cp_comm_type == "all_gather"
    if gathered:
        return (
            f"{subject.label}: keys and values are gathered here before attention starts; that a ring "
            "hides behind attention cannot be seen in this run."
        )
    return (
        f"{subject.label}: the ledger counts what the ring sends; whether it hides behind attention "
        "shows only in a trace of the device."
    )


def _inside_layers(subject: Subject) -> tuple[int, int, int] | None:
    """Wire bytes and calls in forward and backward, wire bytes of gradient sync; busiest rank."""
    record = subject.run.ledgers.communication
    if record is None or not record.ranks:
        return None
    rank = max(record.ranks, key=lambda found: found.wire_bytes)
    inside = [call for call in rank.calls if call.phase in _INSIDE and call.ranks > 1]
    sync = [call for call in rank.calls if call.phase is Phase.GRADIENT_SYNC]
    return (
        sum(call.wire_bytes for call in inside),
        sum(call.calls for call in inside),
        sum(call.wire_bytes for call in sync),
    )


def _exposed(subject: Subject) -> float | None:
    """Share of an iteration spent waiting for calls; None without a time ledger."""
    times = subject.evidence.times
    if times is None:
        return None
    return mean(
        sum(rank.communication_seconds.get(phase, 0.0) for phase in _INSIDE)
        / rank.iteration_seconds
        for rank in times.ranks
        if rank.iteration_seconds
    )
