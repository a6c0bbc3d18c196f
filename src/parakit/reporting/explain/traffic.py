"""What each strategy sends, why that much, and how tensor, sequence and context parallelism compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parakit.costs import Phase
from parakit.formatting.units import DASH, amount, count, joined
from parakit.reporting.analyse.time_shares import mean
from parakit.reporting.explain.predicted import CallComparison, Subject, find_subject

_LARGEST = 3
"""Groups of calls that are named in a sentence."""
_SMALLEST_SHARE = 0.01
"""Of what a rank sends; smaller groups of calls are in the table only."""
_NAMED = 3
_INSIDE = (Phase.FORWARD, Phase.BACKWARD)


def traffic_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """What a configuration of several ranks sends, beside its closed form."""
    if subject.split.world_size > 1:
        yield f"{subject.label}: {_sent(subject.evidence.calls)}{_over_nccl(subject)}"


def _sent(calls: Sequence[CallComparison]) -> str:
    if not calls:
        return "no communication ledger, so what it sends is not known."
    rank = max(calls, key=lambda comparison: comparison.measured_wire_bytes)
    made = sum(row.measured_calls for row in rank.rows)
    worth = _SMALLEST_SHARE * rank.measured_wire_bytes
    rows = [row for row in rank.rows if row.measured_wire_bytes > worth]
    parts = []
    for row in sorted(rows, key=lambda row: -row.measured_wire_bytes)[:_LARGEST]:
        names = row.what.split("; ") if row.what else ["in no closed form"]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        parts.append(
            f"{amount(row.measured_wire_bytes)} in {count(row.measured_calls)} {row.operation} of "
            f"{row.group} ({'; '.join(names[:_NAMED])}{more})"
        )
    verdict = (
        f"Every call of every rank is in the closed form; it has {count(rank.predicted_wire_bytes)} "
        f"bytes for this rank, the ledger {count(rank.measured_wire_bytes)}."
    )
    if left := [item for comparison in calls for item in comparison.unattributed]:
        told = [
            f"{abs(item.calls)} {item.operation} of {item.group} with {count(item.payload_bytes)}"
            f" bytes {'made and in no closed form' if item.calls > 0 else 'predicted and not made'}"
            for item in left[:_LARGEST]
        ]
        more = f", and {len(left) - _LARGEST} more kinds" if len(left) > _LARGEST else ""
        verdict = f"Not attributed: {joined(told)}{more}."
    return (
        f"rank {rank.rank} sends {amount(rank.measured_wire_bytes)} in {count(made)} "
        f"calls an iteration: {joined(parts)}. {verdict}"
    )


def _over_nccl(subject: Subject) -> str:
    """What the same calls would send by NCCL's rings, where gloo sends a tenth more or less."""
    sent, rings = subject.entry.sent_bytes, subject.entry.nccl_bytes
    if sent is None or rings is None or abs(sent - rings) <= 0.1 * rings:
        return ""
    return f" By NCCL's rings it would send {amount(rings)}: gloo reduces and scatters by an all-reduce."


def context_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """Context parallelism beside tensor parallelism of the same ranks and batch."""
    split, spec = subject.split, subject.evidence.configuration
    if split.context == 1:
        return
    tensor = replace(split, context=1, tensor=split.tensor * split.context)
    wanted = [replace(tensor, sequence_parallel=sequence) for sequence in (False, True)]
    found = [find_subject(subjects, subject, other, same_batch=True) for other in wanted]
    others = list(filter(None, found))
    for other in others:
        yield f"{subject.label} against {other.label}{_against(subject, other)}"
    limits = (
        "the ledger counts what the ring sends; whether it hides behind attention "
        "shows only in a trace of the device."
    )
    if spec is not None and spec.cp_comm_type == "all_gather":
        limits = (
            "keys and values are gathered here before attention starts; that a ring "
            "hides behind attention cannot be seen in this run."
        )
    if others:
        yield f"{subject.label}: {limits}"


def _against(subject: Subject, other: Subject) -> str:
    figures, exposed = [], []
    for each in (subject, other):
        record, times = each.run.measurements.communication, each.evidence.times
        if record is None or not record.ranks:
            return ": a communication ledger is missing."
        rank = max(record.ranks, key=lambda found: found.wire_bytes)
        inside = [call for call in rank.calls if call.phase in _INSIDE and call.ranks > 1]
        sync = [call for call in rank.calls if call.phase is Phase.GRADIENT_SYNC]
        sent = [sum(call.wire_bytes for call in calls) for calls in (inside, sync)]
        figures.append((*sent, sum(call.calls for call in inside)))
        waited = times and mean(
            sum(rank.communication_seconds.get(phase, 0.0) for phase in _INSIDE)
            / rank.iteration_seconds
            for rank in times.ranks
            if rank.iteration_seconds
        )
        exposed.append(DASH if waited is None else f"{waited:.0%}")
    (ours, our_sync, our_calls), (theirs, their_sync, their_calls) = figures
    ratio = ours / theirs if theirs else float("inf")
    return (
        f", in forward and backward: {amount(ours)} instead of {amount(theirs)} on the wire "
        f"(×{ratio:.2f}, {'less' if ours < theirs else 'more'}), in {count(our_calls)} instead of "
        f"{count(their_calls)} calls; waiting for them is {exposed[0]} instead of {exposed[1]} of "
        f"the iteration. The gradients it also has to sum add {amount(our_sync)}; {other.label} sums "
        f"{amount(their_sync)}."
    )
