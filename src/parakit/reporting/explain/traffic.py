"""Explain which bytes each strategy sends, and how CP compares with TP and SP.

The figures come from the runs' `comm.json`, which counts every communication call of a steady iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.measurements import TimeRecord
from parakit.costs import Phase
from parakit.formatting.units import DASH, amount, count, joined
from parakit.reporting.analyse.statistics import describe_ratio
from parakit.reporting.analyse.time_shares import mean
from parakit.reporting.explain.predicted import (
    CallComparison,
    CallRow,
    Subject,
    Unattributed,
    find_subject,
)

_MAX_CALL_GROUPS = 3
"""Groups of calls that a sentence names; the table of calls has all."""
_MIN_FRACTION_NAMED = 0.01
"""Fraction of a rank's bytes; smaller groups of calls are in the table only."""
_MAX_PURPOSES = 3
_NOTABLE_DIFFERENCE = 0.1
"""Relative difference of bytes between gloo and NCCL from which on a sentence names it."""
_PASSES = (Phase.FORWARD, Phase.BACKWARD)


def traffic_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """Yield a sentence on the bytes that a run's busiest rank sends, measured and predicted.

    A run of a single rank yields nothing.
    """
    if subject.split.world_size > 1:
        sent = _describe_sent_bytes(subject.evidence.calls)
        yield f"{subject.label}: {sent}{_compare_with_nccl(subject)}"


def answer_traffic(subjects: Sequence[Subject]) -> str:
    """Return sentences on the strategies that send most and fewest bytes, and on whether the predictions hold.

    The text is empty if no run of several ranks has a communication log.
    """
    sent_bytes: dict[str, int] = {}
    labels_of_deviating: list[str] = []
    for subject in subjects:
        if subject.split.world_size == 1 or not subject.evidence.calls:
            continue
        busiest = _busiest_rank(subject.evidence.calls)
        sent_bytes[subject.label] = busiest.measured_wire_bytes
        if any(comparison.unattributed for comparison in subject.evidence.calls):
            labels_of_deviating.append(subject.label)
    if not sent_bytes:
        return ""
    highest = max(sent_bytes, key=sent_bytes.__getitem__)
    lowest = min(sent_bytes, key=sent_bytes.__getitem__)
    text = f"The busiest rank of {highest} sends {amount(sent_bytes[highest])} per iteration"
    if highest != lowest:
        text += f", the most of all; {lowest} sends the least, {amount(sent_bytes[lowest])}"
    if labels_of_deviating:
        return f"{text}. Calls of {joined(labels_of_deviating[:_MAX_CALL_GROUPS])} differ from the closed form."
    return f"{text}. Every measured call is in the planner's closed form."


def _busiest_rank(calls: Sequence[CallComparison]) -> CallComparison:
    """Return the rank that sends most bytes."""
    return max(calls, key=lambda comparison: comparison.measured_wire_bytes)


def _describe_sent_bytes(calls: Sequence[CallComparison]) -> str:
    """Return sentences on the busiest rank: bytes sent, largest groups of calls, agreement with the predicted calls.

    If there is no communication log, the text says so.
    """
    if not calls:
        return "there is no comm.json, so the bytes that it sends are not known."
    rank = _busiest_rank(calls)
    num_calls = sum(row.measured_calls for row in rank.rows)
    least = _MIN_FRACTION_NAMED * rank.measured_wire_bytes
    rows = [row for row in rank.rows if row.measured_wire_bytes > least]
    rows.sort(key=lambda row: -row.measured_wire_bytes)
    parts = [_describe_call_group(row) for row in rows[:_MAX_CALL_GROUPS]]
    deviations = [item for comparison in calls for item in comparison.unattributed]
    if deviations:
        verdict = _describe_deviations(deviations)
    else:
        verdict = (
            "Every call of every rank is in the closed form; for this rank it has "
            f"{count(rank.predicted_wire_bytes)} bytes, measured are {count(rank.measured_wire_bytes)}."
        )
    return (
        f"rank {rank.rank} sends {amount(rank.measured_wire_bytes)} in {count(num_calls)} "
        f"calls per iteration: {joined(parts)}. {verdict}"
    )


def _describe_call_group(row: CallRow) -> str:
    """Return a phrase on one row of calls: bytes, number, operation, group and purposes."""
    purposes = row.what.split("; ") if row.what else ["in no closed form"]
    more = len(purposes) - _MAX_PURPOSES
    more_text = f" and {more} more" if more > 0 else ""
    return (
        f"{amount(row.measured_wire_bytes)} in {count(row.measured_calls)} {row.operation} of "
        f"{row.group} ({'; '.join(purposes[:_MAX_PURPOSES])}{more_text})"
    )


def _describe_deviations(deviations: Sequence[Unattributed]) -> str:
    """Return a sentence on the first calls that were only measured or only predicted."""
    texts = [
        f"{abs(item.calls)} {item.operation} of {item.group} with {count(item.payload_bytes)} bytes"
        f" {'made and in no closed form' if item.calls > 0 else 'predicted and not made'}"
        for item in deviations[:_MAX_CALL_GROUPS]
    ]
    more = len(deviations) - _MAX_CALL_GROUPS
    more_text = f", and {more} more kinds" if more > 0 else ""
    return f"Not attributed: {joined(texts)}{more_text}."


def _compare_with_nccl(subject: Subject) -> str:
    """Return a sentence on the bytes that NCCL's ring algorithms would send in place of gloo's.

    The text is empty if gloo sends about as many bytes, or if one of the numbers is unknown.
    """
    sent, nccl = subject.entry.sent_bytes, subject.entry.nccl_bytes
    if sent is None or nccl is None or abs(sent - nccl) <= _NOTABLE_DIFFERENCE * nccl:
        return ""
    return f" By NCCL's rings it would send {amount(nccl)}: gloo reduces and scatters by an all-reduce."


def context_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield sentences that compare a context-parallel run with runs that use TP or SP instead.

    The runs must have equal numbers of ranks and equal batches. A last sentence says whether the ring's
    communication overlaps with attention. Nothing is yielded without a run to compare with.
    """
    spec = subject.evidence.configuration
    counterparts = _find_tensor_parallel(subject, subjects)
    for counterpart in counterparts:
        yield f"{subject.label} against {counterpart.label}{_compare_traffic(subject, counterpart)}"
    if not counterparts:
        return
    if spec is not None and spec.cp_comm_type == "all_gather":
        yield (
            f"{subject.label}: keys and values are gathered here before attention starts. This run"
            " cannot show how much of a ring's communication overlaps with attention."
        )
    else:
        yield (
            f"{subject.label}: comm.json counts the bytes of the ring. Only a trace of the device shows"
            " whether they overlap with attention."
        )


def _find_tensor_parallel(subject: Subject, subjects: Sequence[Subject]) -> list[Subject]:
    """Return the rows with TP or SP in place of a row's CP, and with equal ranks and batch: at most two.

    The list is empty for a row without CP.
    """
    split = subject.split
    if split.context == 1:
        return []
    tensor = replace(split, context=1, tensor=split.tensor * split.context)
    splits = [replace(tensor, sequence_parallel=is_sequence) for is_sequence in (False, True)]
    rows = [find_subject(subjects, subject, other, same_batch=True) for other in splits]
    return [row for row in rows if row is not None]


def answer_context(subjects: Sequence[Subject]) -> str:
    """Return sentences on the bytes that a CP run sends in forward and backward, relative to TP and SP runs.

    The first CP run with a TP or SP run to compare with is described. A second sentence has the bytes of
    gradients that CP sums in addition. The text is empty if no such pair of runs has communication logs.
    """
    for subject in subjects:
        traffic = _measure_traffic(subject)
        if traffic is None:
            continue
        texts = []
        for counterpart in _find_tensor_parallel(subject, subjects):
            other = _measure_traffic(counterpart)
            if other is not None and other.pass_bytes:
                ratio = traffic.pass_bytes / other.pass_bytes
                texts.append(f"{describe_ratio(ratio)} than {counterpart.label}")
        if texts:
            return (
                f"In forward and backward {subject.label} sends {joined(texts)}. It also sums"
                f" {amount(traffic.gradient_bytes)} of gradients per iteration."
            )
    return ""


@dataclass(frozen=True)
class _Traffic:
    """Bytes that the busiest rank sends per iteration, and the time that ranks wait for them."""

    pass_bytes: int
    """Bytes in forward and backward, without groups of one rank."""
    pass_calls: int
    gradient_bytes: int
    waiting_fraction: float | None
    """Fraction of the iteration that ranks wait in these passes, on average; None without times."""


def _measure_traffic(subject: Subject) -> _Traffic | None:
    """Return the traffic of a run's busiest rank; None without a communication log."""
    record, times = subject.run.measurements.communication, subject.evidence.times
    if record is None or not record.ranks:
        return None
    rank = max(record.ranks, key=lambda candidate: candidate.wire_bytes)
    pass_calls = [call for call in rank.calls if call.phase in _PASSES and call.ranks > 1]
    sync_calls = [call for call in rank.calls if call.phase is Phase.GRADIENT_SYNC]
    return _Traffic(
        pass_bytes=sum(call.wire_bytes for call in pass_calls),
        pass_calls=sum(call.calls for call in pass_calls),
        gradient_bytes=sum(call.wire_bytes for call in sync_calls),
        waiting_fraction=None if times is None else _mean_waiting_fraction(times),
    )


def _mean_waiting_fraction(times: TimeRecord) -> float:
    """Return the fraction of an iteration that communication inside passes takes, averaged over the ranks.

    Ranks without a timed iteration are left out. The fraction is 0 if there are no other ranks.
    """
    fractions = []
    for rank in times.ranks:
        if rank.iteration_seconds:
            waiting_seconds = sum(rank.communication_seconds.get(phase, 0.0) for phase in _PASSES)
            fractions.append(waiting_seconds / rank.iteration_seconds)
    return mean(fractions)


def _compare_traffic(subject: Subject, other: Subject) -> str:
    """Return the end of a sentence that compares bytes, calls and waiting time of two rows.

    If a communication log is missing, the text says so instead.
    """
    traffic, counterpart = _measure_traffic(subject), _measure_traffic(other)
    if traffic is None or counterpart is None:
        return ": a comm.json is missing."
    ratio = float("inf")
    if counterpart.pass_bytes:
        ratio = traffic.pass_bytes / counterpart.pass_bytes
    return (
        f", in forward and backward: {amount(traffic.pass_bytes)} instead of {amount(counterpart.pass_bytes)} on"
        f" the wire ({describe_ratio(ratio)}), in {count(traffic.pass_calls)} instead of"
        f" {count(counterpart.pass_calls)} calls. Waiting for them takes"
        f" {_format_fraction(traffic.waiting_fraction)} instead of"
        f" {_format_fraction(counterpart.waiting_fraction)} of the iteration. In addition {subject.label} sums"
        f" {amount(traffic.gradient_bytes)} of gradients, {other.label} {amount(counterpart.gradient_bytes)}."
    )


def _format_fraction(fraction: float | None) -> str:
    """Return a fraction in percent, or a dash if it is unknown."""
    return DASH if fraction is None else f"{fraction:.0%}"
