"""Judge which rank stopped a training job, which ranks merely wait for it, and what to look at next.

The input is the evidence of all ranks (`HangEvidence`). The result is a `HangVerdict`. A rank that others wait
for and that waits for nobody is a root (see `parakit.hang.waits`); most verdicts name the roots. A rank is a
culprit if the evidence shows that it stopped, and a suspect if it is one of several that may have stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from parakit.formatting.units import plural
from parakit.hang.behind import RankBehind, find_ranks_behind
from parakit.hang.evidence import (
    ComparedCalls,
    GroupOfRanks,
    HangEvidence,
    RankEvidence,
    RecordedCall,
    Signature,
)
from parakit.hang.location import locate_call, locate_departure, locate_rank
from parakit.hang.order import (
    CallMismatch,
    Departure,
    find_departure,
    find_mismatch,
    follow_usual_order,
)
from parakit.hang.place import (
    DATA_LOADING,
    PIPELINE_EXCHANGE,
    SAVING,
    StepPlace,
    locate_call_in_step,
    locate_frames,
)
from parakit.hang.waits import (
    TORCH_DISTRIBUTED,
    Wait,
    Waits,
    find_waits,
    is_in_collective,
    is_in_recorded_collective,
)
from parakit.hang.wording import (
    describe_begun_call,
    describe_call,
    describe_ranks,
    describe_wait_call,
    describe_waiting_ranks,
    format_ranks,
    join_ranks,
)

QUIET_SECONDS = 5.0
"""Seconds without a call after which a job may hang. A shorter pause is never taken for a hang."""
USUAL_PAUSES = 3
"""Multiple of the longest usual pause between calls that a pause must exceed to count as a hang."""
MOST_EXTRA_SECONDS = 60.0
"""Most seconds beyond the longest usual pause. A minute more is a sign of a hang in any job."""

SHOWN_WAITS = 12
"""Most lines of `HangVerdict.chain`."""
SHOWN_CYCLE_WAITS = 4
"""Most waits of a cycle of ranks that the sentence names."""


class HangOutcome(StrEnum):
    """Answer to the question whether a job hangs."""

    HANG = "hang"
    SLOW = "slow"
    NONE = "no hang"
    UNDECIDED = "undecided"


class HangKind(StrEnum):
    """Kind of a hang; each kind has its own next step."""

    NEVER_ENTERED = "never entered"
    OTHER_COLLECTIVE = "other collective"
    NOT_COMPLETED = "entered and not completed by anybody"
    NOT_COMPLETED_HERE = "entered, completed by the others, not by this rank"
    TWO_ROOTS = "two roots"


_NEXT_STEPS = {
    HangKind.NEVER_ENTERED: "Look at that rank's stack (py-spy dump) and at its machine's kernel log: "
    "the rank is dead, stopped, in host code or in a kernel.",
    HangKind.OTHER_COLLECTIVE: "Compare the two places in the code: a branch that depends on the rank or "
    "on data skips, adds or changes a call.",
    HangKind.NOT_COMPLETED: "Look at the network between these ranks (NCCL_DEBUG=INFO, links, interfaces, "
    "firewall): all ranks made the same call, so the code is not the cause.",
    HangKind.NOT_COMPLETED_HERE: "Look at that rank's device: a CUDA error in the rank's log, nvidia-smi, "
    "and its machine's kernel log (Xid).",
    HangKind.TWO_ROOTS: "Look at each of these ranks separately: none of them waits for another.",
}


_NEXT_STEPS_IN_PARTS = {
    DATA_LOADING: "Look at what feeds that rank: the workers of its data loader (py-spy dump of each), and "
    "the storage of its data.",
    SAVING: "Look at the storage of the checkpoint, and at the processes and threads of that rank that write it.",
}
"""Next steps for ranks that never entered a call, by the part of the step that their stacks are in."""
_STEP_AT_LINE = (
    "Look at that line: it loops, waits or computes for longer than the others. If it is a call of a library, "
    "py-spy dump --native shows where inside."
)


@dataclass(frozen=True)
class HangVerdict:
    """Verdict on a job: which ranks stopped, which ranks wait, and where.

    `JSON=1` prints all fields but the last two.
    """

    verdict: HangOutcome
    sentence: str
    culprits: tuple[int, ...] = ()
    """Ranks that stopped; empty if the evidence names none."""
    suspects: tuple[int, ...] = ()
    """Ranks of which one stopped; the evidence does not say which."""
    waiting: tuple[int, ...] = ()
    """Ranks that wait in a call, without the culprits."""
    kind: HangKind | None = None
    group: str | None = None
    call: str | None = None
    module: str | None = None
    chain: tuple[str, ...] = ()
    """Lines on who waits for whom, waits for culprits and suspects first; at most SHOWN_WAITS."""
    next_step: str = ""
    """Sentence on what to look at next; empty if the kind of hang is unknown."""


def judge_hang(evidence: HangEvidence) -> HangVerdict:
    """Return the verdict on a job that hangs, or on a job that a failed call ended."""
    waits = find_waits(evidence)
    stopped_ranks = [rank for rank, state in evidence.ranks.items() if state.is_stopped]
    if stopped_ranks:
        single_roots = [root[0] for root in waits.roots if len(root) == 1]
        roots_outside_calls = [rank for rank in single_roots if rank not in waits.ranks_in_calls]
        return _judge_roots(
            waits, [*stopped_ranks, *roots_outside_calls, *_find_silent_ranks(waits)]
        )
    mismatch = find_mismatch(evidence)
    if mismatch and (waits.ranks_in_calls or evidence.is_over):
        return _judge_mismatch(waits, mismatch)
    failed_ranks = [
        rank for rank in sorted(evidence.failures) if not evidence.get_rank(rank).is_known
    ]
    if failed_ranks:
        return _judge_failed_ranks(waits, failed_ranks)
    if evidence.is_over:
        return _judge_failed_job(waits)
    stuck_ranks = [rank for rank in evidence.stuck if not evidence.get_rank(rank).is_known]
    if stuck_ranks:
        return _judge_stuck_ranks(waits, stuck_ranks)
    return _judge_job_at_work(waits) or _judge_waits(waits)


def _judge_failed_ranks(waits: Waits, ranks: Sequence[int]) -> HangVerdict:
    """Return a verdict that names `ranks`: their logs report that they ended by themselves."""
    evidence = waits.evidence
    sentences = []
    for rank in ranks:
        reason = evidence.failures[rank].removeprefix(f"rank {rank}: ").rstrip(".")
        prefix = (
            ""
            if reason.startswith("Rank ")
            else f"{evidence.name_rank(rank)} ended. Its log reports: "
        )
        sentences.append(f"{prefix}{reason}. {_count_waiting_ranks(waits, rank)}".strip())
    return _make_verdict(
        waits,
        sentence=" ".join(sentences),
        culprits=ranks,
        kind=HangKind.NEVER_ENTERED,
        next_step="Read the log above that rank's error: the other ranks only lost it.",
    )


def _judge_stuck_ranks(waits: Waits, ranks: Sequence[int]) -> HangVerdict:
    """Return the verdict on ranks whose watchdog was blocked and that left no other evidence.

    A single such rank is the culprit if other ranks wait in calls. Otherwise the ranks are suspects, because
    watchdogs are also blocked when another rank's watchdog ends the job.
    """
    is_decided = len(ranks) == 1 and bool(waits.ranks_in_calls)
    names = format_ranks(ranks)
    sentence = (
        f"The watchdog of {names} was blocked: a thread holds Python's lock, or a call of CUDA does not "
        f"return. {describe_ranks(waits.evidence)}"
    )
    return _make_verdict(
        waits,
        sentence=sentence,
        culprits=ranks if is_decided else (),
        suspects=() if is_decided else ranks,
        kind=HangKind.NEVER_ENTERED if is_decided else None,
        next_step="Look at all threads of that rank (py-spy dump --native): one of them is in a call of CUDA.",
    )


def _judge_begun_calls(waits: Waits) -> HangVerdict:
    """Return an undecided verdict on a log that has only the beginnings of calls, or one call that differs.

    Before each call torch waits for all ranks of the group. So if all calls are of one group, a rank with a lower
    number did not come to the last call, or the log was cut off: it is a suspect.
    """
    evidence = waits.evidence
    sentences = [
        f"torch found that {describe_call(call)}{_describe_number(call)} of {format_ranks([rank])} differs from the "
        "call of another rank, which the log does not show: add the logs of the other ranks."
        for rank, call in evidence.differing.items()
    ]
    late_ranks = []
    if evidence.begun:
        sentences.append(
            "The log shows which calls the ranks began, and neither their groups nor their ends. "
            f"{describe_ranks(evidence)}"
        )
        if evidence.is_begun_in_one_group:
            last_number = max(call.number for call in evidence.begun.values())
            late_ranks = [
                rank for rank, call in evidence.begun.items() if call.number < last_number
            ]
    return _make_verdict(
        waits,
        sentence=" ".join(sentences),
        suspects=sorted(late_ranks),
        kind=HangKind.OTHER_COLLECTIVE if evidence.differing else None,
    )


def _judge_failed_job(waits: Waits) -> HangVerdict:
    """Return the verdict on a job that a failed call ended.

    The culprit is the rank that left the usual order of calls. If no rank did, it is the only rank without
    recorded calls, provided that all other ranks made their usual calls. Otherwise the verdict is undecided.
    """
    evidence = waits.evidence
    departure = find_departure(evidence, evidence.ranks)
    if departure:
        return _judge_departure(waits, departure)
    silent_ranks = [rank for rank in evidence.all_ranks if not evidence.get_rank(rank).calls]
    recorded_ranks = evidence.all_ranks - {*silent_ranks}
    if len(silent_ranks) != 1 or not follow_usual_order(evidence, recorded_ranks):
        return _make_undecided_verdict(
            evidence,
            "A failure ended the ranks, and this evidence does not show whose call it was.",
        )
    (silent_rank,) = silent_ranks
    last_calls = [evidence.get_rank(rank).calls[-1] for rank in recorded_ranks]
    shared_calls = [call for call in last_calls if silent_rank in evidence.groups[call.group].ranks]
    return _make_verdict(
        waits,
        sentence=f"{evidence.name_rank(silent_rank)} left no calls, and all other ranks made their "
        "usual calls.",
        culprits=[silent_rank],
        kind=HangKind.OTHER_COLLECTIVE,
        call=min(shared_calls, key=lambda call: call.created_ns, default=None),
    )


def _judge_waits(waits: Waits) -> HangVerdict:
    """Return the verdict on a job with waiting ranks, from the graph of waits and the roots of this graph.

    Roots are ranks that others wait for and that wait for nobody, or cycles of ranks that wait for each other. If
    the verdict has no culprit, a rank that left the usual order of calls is looked for.
    """
    ranks_behind = find_ranks_behind(waits)
    is_single_cycle = len(waits.roots) == 1 and len(waits.roots[0]) > 1
    if is_single_cycle and not ranks_behind:
        return _judge_cycle(waits, waits.roots[0])
    root_ranks = _list_root_ranks(waits)
    if ranks_behind:
        return _judge_ranks_behind(waits, ranks_behind, root_ranks)
    has_known_root = any(waits.evidence.get_rank(rank).is_known for rank in root_ranks)
    if root_ranks and not has_known_root:
        # The roots may only be missing from the log. If the log shows ranks at different numbers in one call, these
        # ranks are known to disagree.
        verdict_on_call = _judge_partly_completed_call(waits)
        if verdict_on_call and _are_waits_only_reported(waits, root_ranks):
            return verdict_on_call
    verdict = _judge_roots(waits, root_ranks) if root_ranks else _judge_without_roots(waits)
    if verdict.culprits or not waits.ranks_in_calls:
        return verdict
    departure = find_departure(waits.evidence, waits.evidence.ranks)
    if departure is None:
        return verdict
    return _judge_departure(waits, departure, verdict.sentence)


def _list_root_ranks(waits: Waits) -> list[int]:
    """Return the ranks of all roots that may be the cause, and ranks that left nothing if there is such a root.

    A collective that its whole group has entered completes without further calls of its ranks. They wait for the
    network, so they are no cause.
    """
    waiting_for_network = _find_ranks_that_wait_for_network(waits)
    root_ranks = [rank for root in waits.roots for rank in root if rank not in waiting_for_network]
    if root_ranks:
        root_ranks += _find_silent_ranks(waits)
    return root_ranks


def _find_ranks_that_wait_for_network(waits: Waits) -> set[int]:
    """Return the ranks in an unfinished collective that all its ranks entered and in which nobody waits for them."""
    awaited_in_calls: set[tuple[int, str, int]] = set()
    for waits_of_rank in waits.waits_by_rank.values():
        for wait in waits_of_rank:
            if wait.call:
                awaited_in_calls.add((wait.awaited_rank, wait.call.group, wait.call.number))
    ranks = set()
    for group, call in waits.unfinished_collectives:
        for rank in group.ranks:
            pending_calls = waits.evidence.get_rank(rank).pending
            is_in_call = any(
                (pending.group, pending.number) == (call.group, call.number)
                for pending in pending_calls
            )
            if is_in_call and (rank, call.group, call.number) not in awaited_in_calls:
                ranks.add(rank)
    return ranks


def _judge_ranks_behind(
    waits: Waits, ranks_behind: Sequence[RankBehind], roots: Sequence[int]
) -> HangVerdict:
    """Return a verdict that names the ranks whose devices are behind, and other ranks that stopped."""
    evidence = waits.evidence
    behind = [rank_behind.rank for rank_behind in ranks_behind]
    other_roots = sorted({*roots} - {*behind})
    stopped_roots = [
        rank
        for rank in other_roots
        if evidence.get_rank(rank).is_known and not _may_wait_unrecorded(waits, rank)
    ]
    sentences = [_describe_rank_behind(waits, rank_behind) for rank_behind in ranks_behind]
    sentences += [_describe_root(waits, rank) for rank in stopped_roots]
    return _make_verdict(
        waits,
        sentence=" ".join(sentences),
        culprits=[*behind, *stopped_roots],
        suspects=[rank for rank in other_roots if rank not in stopped_roots],
        kind=HangKind.TWO_ROOTS if stopped_roots else HangKind.NOT_COMPLETED_HERE,
        call=ranks_behind[0].first_call,
    )


def _describe_rank_behind(waits: Waits, behind: RankBehind) -> str:
    """Return sentences on the call that a rank did not complete, and on the number of calls that it is behind."""
    evidence, call = waits.evidence, behind.first_call
    group = evidence.groups[call.group]
    sentences = [
        f"{evidence.name_rank(behind.rank)} entered {call} of its {group.label} and did not complete it; "
        f"{format_ranks(behind.peers)} did.",
        _describe_location(waits, evidence.get_rank(behind.rank)),
        f"Rank {behind.rank} is {plural(behind.num_calls, 'call')} behind, "
        f"in {plural(behind.num_groups, 'group')}.",
        _count_waiting_ranks(waits, behind.rank),
    ]
    return " ".join(filter(None, sentences))


def _find_silent_ranks(waits: Waits) -> list[int]:
    """Return the ranks that are in no call and, before their dump, made no call for longer than a usual pause.

    Such a rank has stopped, even if no rank waits for it yet.
    """
    allowed_seconds = _find_usual_pause_seconds(waits.evidence)
    silent_ranks = []
    for rank, state in waits.evidence.ranks.items():
        if rank in waits.ranks_in_calls or rank in waits.ranks_in_pipeline_communication:
            continue
        if state.stack and state.calls and state.dumped_ns:
            seconds_since_call = (state.dumped_ns - state.calls[-1].created_ns) / 1e9
            if seconds_since_call > allowed_seconds:
                silent_ranks.append(rank)
    return silent_ranks


def _find_usual_pause_seconds(evidence: HangEvidence) -> float:
    """Return the longest pause between calls, in seconds, that is not a sign of a hang; at least QUIET_SECONDS.

    The result is USUAL_PAUSES times the longest pause that occurred at least twice before calls of one signature.
    It exceeds this pause by at most MOST_EXTRA_SECONDS. The longest pause of each signature is ignored, because
    pauses of start-up occur once.
    """
    longest_pause = 0.0
    for state in evidence.ranks.values():
        pauses_by_signature: dict[Signature, list[float]] = {}
        for previous, call in pairwise(call for call in state.calls if call.created_ns):
            pause = (call.created_ns - previous.created_ns) / 1e9
            pauses_by_signature.setdefault(call.signature, []).append(pause)
        for pauses in pauses_by_signature.values():
            if len(pauses) > 1:
                longest_pause = max(longest_pause, sorted(pauses)[-2])
    return max(QUIET_SECONDS, min(USUAL_PAUSES * longest_pause, longest_pause + MOST_EXTRA_SECONDS))


def _judge_job_at_work(waits: Waits) -> HangVerdict | None:
    """Return the verdict on a job that may still work, because it shows no waiting ranks; None if it may hang.

    The verdict is SLOW if ranks made calls just before the dumps. If no rank is in a call, the verdict is that
    there is no hang, or undecided. It is also undecided if the log has only the beginnings of calls. None means
    that ranks wait in calls, or that a watchdog reported a timeout.
    """
    evidence = waits.evidence
    if evidence.timed_out:
        return None
    has_calls = evidence.begun or evidence.differing
    if has_calls and not any(state.is_known for state in evidence.ranks.values()):
        return _judge_begun_calls(waits)
    verdict = _judge_recent_calls(waits.evidence)
    if verdict or waits.ranks_in_calls:
        return verdict
    return _judge_completed_calls(waits.evidence)


def _judge_recent_calls(evidence: HangEvidence) -> HangVerdict | None:
    """Return the verdict SLOW if the last call before the dumps is recent, within a usual pause; otherwise None."""
    states = evidence.ranks.values()
    dump_times = [state.dumped_ns for state in states if state.dumped_ns and state.calls]
    if not dump_times:
        return None
    last_call_ns = max(state.calls[-1].created_ns for state in states if state.calls)
    # Ranks write their dumps some time after they were asked. A rank that failed wrote its dump long before.
    asked_ns = evidence.asked_ns or min(dump_times)
    quiet_seconds = (asked_ns - last_call_ns) / 1e9
    usual_seconds = _find_usual_pause_seconds(evidence)
    if quiet_seconds >= usual_seconds:
        return None
    return HangVerdict(
        HangOutcome.SLOW,
        "No sign of a hang: the last call was entered "
        f"{max(quiet_seconds, 0):.1f} s before the dumps, and pauses of {usual_seconds:.0f} s are usual here.",
    )


def _judge_completed_calls(evidence: HangEvidence) -> HangVerdict:
    """Return the verdict on a job in which no rank is in a call: there is no hang, or it is undecided."""
    states = evidence.ranks.values()
    if all(state.calls and not state.stack for state in states):
        # Ranks of the same groups that completed everything have the same last calls.
        distinct_ends = {tuple(sorted(state.last.items())) for state in states}
        if len(distinct_ends) <= len(evidence.groups):
            return HangVerdict(
                HangOutcome.NONE, "No rank hangs: every recorded call was completed."
            )
    is_counted_in_call = any(
        progress.entered > progress.completed
        for state in states
        for progress in state.progress.values()
    )
    if is_counted_in_call:
        return _make_undecided_verdict(
            evidence,
            "Only numbers of calls are known, so this evidence does not show who waits for whom.",
        )
    return _make_undecided_verdict(
        evidence, "No rank is in an unfinished call, so this evidence does not show a hang."
    )


def _judge_roots(waits: Waits, roots: Sequence[int]) -> HangVerdict:
    """Return the verdict on roots: the ranks that other ranks wait for.

    The cases are tried in this order:

    1. No root left evidence. A single root is the culprit, and several roots are suspects. A single root is only a
       suspect if nothing but a log shows that others wait for it, because its own lines may be missing.
    2. A root with evidence may itself wait in a call that was not recorded. Then all roots are suspects. If all roots
       are in pipeline communication, the verdict is about that communication.
    3. Else the roots with evidence are the culprits, and the other roots are suspects.
    """
    ranks = sorted(set(roots))
    known_ranks = [rank for rank in ranks if waits.evidence.get_rank(rank).is_known]
    if not known_ranks and (len(ranks) > 1 or _are_waits_only_reported(waits, ranks)):
        return _make_verdict(waits, sentence=_describe_unknown_roots(waits, ranks), suspects=ranks)
    if any(_may_wait_unrecorded(waits, rank) for rank in known_ranks):
        if set(ranks) <= set(waits.ranks_in_pipeline_communication):
            return _judge_pipeline_communication(waits)
        return _make_verdict(
            waits,
            sentence=f"Other ranks wait for {format_ranks(ranks)}, and at least one of these waits in a "
            "call that was not recorded.",
            suspects=ranks,
        )
    culprits = known_ranks or ranks
    return _make_verdict(
        waits,
        sentence=" ".join(_describe_root(waits, rank) for rank in culprits),
        culprits=culprits,
        suspects=[rank for rank in ranks if rank not in culprits],
        kind=HangKind.TWO_ROOTS if len(culprits) > 1 else HangKind.NEVER_ENTERED,
    )


def _are_waits_only_reported(waits: Waits, roots: Sequence[int]) -> bool:
    """Return True if other ranks wait for `roots`, and only lines of a log show these waits."""
    waits_for_roots = waits.direct_waits_for(roots)
    return bool(waits_for_roots) and all(
        wait.call is not None and wait.call.is_reported for wait in waits_for_roots
    )


def _describe_unknown_roots(waits: Waits, roots: Sequence[int]) -> str:
    """Return sentences on one or several ranks that left no evidence although other ranks wait for them."""
    is_single = len(roots) == 1
    waiting = _describe_waits_for_unknown_roots(waits, roots, pronoun="it" if is_single else "them")
    names = format_ranks(roots)
    if is_single:
        return (
            f"{names.capitalize()} left nothing, and {waiting}. It stopped before that call, or its lines are "
            "missing."
        )
    blocked = sorted({*waits.evidence.blocked_later} & {*roots})
    if blocked:
        return (
            f"No call of {names} is known, and {waiting}. Which of them stopped is not known. The "
            f"watchdog of {format_ranks(blocked)} was blocked, after the timeout."
        )
    return f"{names.capitalize()} left nothing, and {waiting}. Which of them stopped is not known."


def _describe_waits_for_unknown_roots(waits: Waits, roots: Sequence[int], *, pronoun: str) -> str:
    """Return a clause on the ranks that wait for `roots`. If they wait in one call, it names the call and its place."""
    waits_for_roots = waits.direct_waits_for(roots)
    calls = {describe_wait_call(waits.evidence, wait) for wait in waits_for_roots}
    if len(calls) != 1:
        return f"{plural(len(waits.ranks_in_calls), 'rank')} wait for {pronoun}"
    (call_text,) = calls
    clause = f"{describe_waiting_ranks(waits_for_roots)} for {pronoun} in {call_text}"
    call = waits_for_roots[0].call
    location = str(locate_call(waits.evidence, call)) if call else ""
    return f"{clause} ({location})" if location else clause


def _may_wait_unrecorded(waits: Waits, rank: int) -> bool:
    """Return True if the rank's stack is in a call that its flight recorder may not have recorded."""
    state = waits.evidence.get_rank(rank)
    if state.is_stopped or rank not in waits.ranks_in_calls or not is_in_collective(state.stack):
        return False
    # A flight recorder would have recorded every other collective as entered.
    return not state.calls or not is_in_recorded_collective(state.stack)


def _describe_root(waits: Waits, rank: int) -> str:
    """Return sentences on a root: the call that it missed, where it is, and how many ranks wait for it."""
    state = waits.evidence.get_rank(rank)
    sentences = [
        _describe_missed_call(waits, state),
        _describe_location(waits, state),
        _count_waiting_ranks(waits, rank),
    ]
    return " ".join(filter(None, sentences))


def _describe_missed_call(waits: Waits, state: RankEvidence) -> str:
    """Return a sentence on the call in which other ranks wait for this rank.

    If no rank waits for it, the sentence says only that the rank stopped.
    """
    evidence = waits.evidence
    subject = evidence.name_rank(state.rank)
    waits_for_rank = waits.direct_waits_for([state.rank])
    if not waits_for_rank:
        end = "was stopped by a signal (SIGSTOP)" if state.is_stopped else "stopped"
        return f"{subject} {end}."
    if state.is_stopped:
        subject += " was stopped by a signal (SIGSTOP) and"
    call = waits_for_rank[0].call
    if call is None:
        waiting = describe_waiting_ranks(waits_for_rank)
        return f"{subject} never came to the pipeline communication in which {waiting}."
    group = evidence.groups[call.group]
    waits_in_group = [
        wait for wait in waits_for_rank if wait.call and wait.call.group == group.name
    ]
    has_entered = state.last.get(group.name, -1) >= call.number and not state.is_stopped
    action = "entered, and its device never began," if has_entered else "never entered"
    waiting = describe_waiting_ranks(waits_in_group)
    location = str(locate_call(evidence, call))
    in_brackets = f" ({location})" if location else ""
    return f"{subject} {action} {call} of its {group.label}, in which {waiting}{in_brackets}."


def _describe_location(waits: Waits, state: RankEvidence) -> str:
    """Return a sentence on where a rank is, by its stack or its last call.

    For a rank without any evidence the sentence says so. It is empty if the evidence does not show the location.
    """
    if state.stack and (location := locate_rank(waits, state.rank)).line:
        return f"Rank {state.rank} is in {location}."
    if state.calls:
        last_index = len(state.calls) - 1
        last_location = str(locate_call_in_step(state.calls, last_index, waits.evidence.stage))
        if last_location:
            return f"The last call of rank {state.rank} was in {last_location}."
    begun_call = waits.evidence.begun.get(state.rank)
    if begun_call is not None:
        return f"Rank {state.rank} {describe_begun_call(begun_call)}."
    return "" if state.is_known else f"Rank {state.rank} left nothing."


def _count_waiting_ranks(waits: Waits, root: int) -> str:
    """Return a sentence on how many ranks wait for `root`, and in how many groups; empty if no rank waits."""
    waiting_ranks = waits.ranks_waiting_for([root])
    if not waiting_ranks:
        return ""
    groups = {
        wait.call.group
        for rank in waiting_ranks
        for wait in waits.waits_by_rank.get(rank, ())
        if wait.call
    }
    verb = "waits" if len(waiting_ranks) == 1 else "wait"
    in_groups = f", in {plural(len(groups), 'group')}" if groups else ""
    return f"{plural(len(waiting_ranks), 'rank')} {verb} for rank {root}{in_groups}."


def _judge_mismatch(waits: Waits, mismatch: CallMismatch) -> HangVerdict:
    """Return the verdict on two ranks that made different calls under one number of their group.

    The culprit is the rank that left the usual order of calls. If there is none, it is the only rank of the group
    with a different call. Otherwise both ranks are suspects.
    """
    evidence = waits.evidence
    (rank, call), (other_rank, other_call) = mismatch.first, mismatch.second
    departure = find_departure(evidence, mismatch.group.ranks)
    culprit = departure.rank if departure else _find_only_rank_that_differs(evidence, mismatch)
    # A number that both calls have is named once.
    other_number = _describe_number(other_call) if other_call.number != call.number else ""
    sentence = (
        f"{evidence.name_rank(rank)} called {describe_call(call)}{_describe_number(call)} of its "
        f"{mismatch.group.label} where rank {other_rank} called {describe_call(other_call)}"
        f"{other_number}: another {mismatch.differs}."
    )
    if culprit is None:
        return _make_verdict(
            waits,
            sentence=sentence,
            suspects=(rank, other_rank),
            kind=HangKind.OTHER_COLLECTIVE,
            call=call,
        )
    wrong_call, usual_call = (call, other_call) if culprit == rank else (other_call, call)
    location = locate_call(evidence, usual_call)
    if departure:
        location = locate_departure(evidence, departure)
    return _make_verdict(
        waits,
        sentence=f"{evidence.name_rank(culprit)} left the order of calls. {sentence}",
        culprits=(culprit,),
        kind=HangKind.OTHER_COLLECTIVE,
        call=wrong_call,
        location=location,
    )


def _describe_number(call: RecordedCall) -> str:
    """Return ` as no. 7` for the number of a call; empty if it has none."""
    return f" as no. {call.number}" if call.number else ""


def _find_only_rank_that_differs(evidence: HangEvidence, mismatch: CallMismatch) -> int | None:
    """Return the only rank whose call differs, if at least two other ranks made equal calls.

    None means that there is no such rank, or that not all ranks of the group are known. If torch compared the
    calls, only the pairs that it reported are used.
    """
    if evidence.compared:
        return _find_rank_in_all_pairs(evidence.compared)
    if not mismatch.group.is_whole:
        return None
    number = mismatch.first[1].number
    ranks_by_call: dict[object, list[int]] = {}
    for rank in mismatch.group.ranks:
        call = evidence.get_rank(rank).collectives(mismatch.group.name).get(number)
        if call:
            ranks_by_call.setdefault((call.operation, call.sizes, call.dtypes), []).append(rank)
    smallest_first = sorted(ranks_by_call.values(), key=len)
    if len(smallest_first) != 2:
        return None
    minority, majority = smallest_first
    return minority[0] if len(minority) == 1 < len(majority) else None


def _find_rank_in_all_pairs(pairs: Sequence[ComparedCalls]) -> int | None:
    """Return the only rank that is in every pair of different calls.

    None means that there is no such rank, that it has a single peer, or that the calls of its peers differ.
    """
    ranks_by_pair = [{rank for rank, _ in pair} for pair in pairs]
    ranks_in_all = set.intersection(*ranks_by_pair)
    if len(ranks_in_all) != 1:
        return None
    (odd_rank,) = ranks_in_all
    peer_calls: dict[int, RecordedCall] = {}
    for pair in pairs:
        for rank, call in pair:
            if rank != odd_rank:
                peer_calls[rank] = call
    distinct_calls = {(call.operation, call.sizes, call.dtypes) for call in peer_calls.values()}
    if len(peer_calls) == 1 or len(distinct_calls) != 1:
        return None
    return odd_rank


def _judge_cycle(waits: Waits, cycle: tuple[int, ...]) -> HangVerdict:
    """Return the verdict on ranks that wait for each other in a cycle.

    The culprit is the rank that left the usual order of calls. If there is none, all ranks of the cycle are
    suspects.
    """
    waits_in_cycle = [
        wait for rank in cycle for wait in waits.waits_by_rank[rank] if wait.awaited_rank in cycle
    ]
    statements = "; ".join(
        f"rank {wait.rank} waits for rank {wait.awaited_rank} in "
        f"{describe_wait_call(waits.evidence, wait)}"
        for wait in waits_in_cycle[:SHOWN_CYCLE_WAITS]
    )
    departure = find_departure(waits.evidence, cycle)
    if departure:
        return _judge_departure(waits, departure, f"{statements}.")
    return _make_verdict(
        waits,
        sentence=f"Ranks {join_ranks(cycle)} wait for each other: {statements}.",
        suspects=cycle,
        kind=HangKind.OTHER_COLLECTIVE,
    )


def _judge_departure(waits: Waits, departure: Departure, next_sentence: str = "") -> HangVerdict:
    """Return the verdict on the rank that left the usual order of calls.

    `next_sentence` is appended to the verdict's sentence.
    """
    usual_call = departure.usual
    usual = f"{usual_call.operation} of {usual_call.description or 'its group'}"
    return _make_verdict(
        waits,
        sentence=f"{waits.evidence.name_rank(departure.rank)} left the order of calls: it called "
        f"{describe_call(departure.call)} where {usual} usually follows. {next_sentence}",
        culprits=(departure.rank,),
        kind=HangKind.OTHER_COLLECTIVE,
        call=departure.wrong_call,
        location=locate_departure(waits.evidence, departure),
    )


def _judge_without_roots(waits: Waits) -> HangVerdict:
    """Return the verdict on a job in which ranks wait and the evidence names no rank that they wait for.

    The causes are tried in this order: a call that only some ranks completed, a collective that all ranks
    entered, pipeline communication, two threads in collectives, and a single rank outside of all calls. If none
    fits, the ranks outside of calls are suspects.
    """
    evidence = waits.evidence
    verdict_on_call = _judge_partly_completed_call(waits)
    if verdict_on_call:
        return verdict_on_call
    collectives_of_full_groups = [
        (group, call) for group, call in waits.unfinished_collectives if group.is_whole
    ]
    if collectives_of_full_groups:
        group, call = min(collectives_of_full_groups, key=lambda pair: pair[1].created_ns)
        return _judge_uncompleted_call(waits, group, call)
    ranks_outside_calls = []
    ranks_with_threads = []
    for rank, state in evidence.ranks.items():
        if rank not in waits.ranks_in_calls:
            if state.stack:
                ranks_outside_calls.append(rank)
        elif state.communicating_threads:
            ranks_with_threads.append(rank)
    if waits.ranks_in_pipeline_communication and not ranks_outside_calls:
        return _judge_pipeline_communication(waits)
    if ranks_with_threads:
        return _judge_threads(waits, ranks_with_threads)
    if len(ranks_outside_calls) == 1 and waits.ranks_in_calls:
        (rank,) = ranks_outside_calls
        location = locate_frames(evidence.get_rank(rank).stack)
        return _make_verdict(
            waits,
            sentence=f"{evidence.name_rank(rank)} is in {location}; all other ranks wait in a collective.",
            culprits=ranks_outside_calls,
            kind=HangKind.NEVER_ENTERED,
        )
    return _make_verdict(
        waits,
        sentence="Ranks wait in calls, and this evidence does not show for whom. "
        f"{describe_ranks(evidence)}",
        suspects=ranks_outside_calls,
    )


def _judge_threads(waits: Waits, ranks: Sequence[int]) -> HangVerdict:
    """Return the verdict on ranks whose main thread and another thread are in collectives at the same time.

    The sentence names the thread of the first rank.
    """
    first_rank = ranks[0]
    thread = waits.evidence.get_rank(first_rank).communicating_threads[0]
    collectives = [frame.function for frame in thread.frames if TORCH_DISTRIBUTED in frame.file]
    return _make_verdict(
        waits,
        sentence=f"Two threads of {format_ranks(ranks)} are in collectives at once. In rank {first_rank} the thread "
        f"{thread.name} is in {collectives[0]}. {describe_ranks(waits.evidence)} Threads have no common order of "
        "calls, so that calls of one group do not fit together.",
        suspects=ranks,
        kind=HangKind.OTHER_COLLECTIVE,
        next_step="Give the thread a process group of its own, or wait for it before the main thread communicates.",
    )


def _judge_uncompleted_call(waits: Waits, group: GroupOfRanks, call: RecordedCall) -> HangVerdict:
    """Return the verdict on a collective that all ranks of the group entered and at least one did not complete."""
    ranks_that_completed = _find_ranks_that_completed(waits.evidence, group, call)
    who = f"only {format_ranks(ranks_that_completed)}" if ranks_that_completed else "nobody"
    return _make_verdict(
        waits,
        sentence=f"All ranks of the {group.label} ({join_ranks(group.ranks)}) entered {call}, and {who} "
        "completed it.",
        suspects=group.ranks,
        kind=HangKind.NOT_COMPLETED,
        call=call,
    )


def _judge_partly_completed_call(waits: Waits) -> HangVerdict | None:
    """Return the verdict on a call that only some ranks of the group completed; None if there is no such call.

    All ranks of the group are suspects. The verdict's sentence states how many calls each rank entered in this
    group.
    """
    evidence = waits.evidence
    # In a log the lines of some ranks may be missing, so that it looks as if a call was awaited from them.
    reported_calls = [
        (evidence.groups[call.group], call)
        for state in evidence.ranks.values()
        for call in state.pending
        if call.is_reported and call.number
    ]
    for group, call in (*waits.unfinished_collectives, *reported_calls):
        # A rank that completed a fitting call would have it among its recorded calls, so this rank
        # completed another call under the same number.
        ranks_that_completed = [
            rank
            for rank in _find_ranks_that_completed(evidence, group, call)
            if call.number not in evidence.get_rank(rank).collectives(group.name)
        ]
        if ranks_that_completed:
            sentence = _describe_partly_completed_call(evidence, group, call, ranks_that_completed)
            return _make_verdict(waits, sentence=sentence, suspects=group.ranks, call=call)
    return None


def _describe_partly_completed_call(
    evidence: HangEvidence,
    group: GroupOfRanks,
    call: RecordedCall,
    ranks_that_completed: Sequence[int],
) -> str:
    """Return sentences on a call that only some ranks completed, and on how many calls apart the ranks are."""
    other_ranks = [
        rank
        for rank in group.ranks
        if rank not in ranks_that_completed and evidence.get_rank(rank).is_known
    ]
    counts = "; ".join(
        f"rank {rank} completed {_describe_last(evidence.get_rank(rank).completed, group)} and entered "
        f"{_describe_last(evidence.get_rank(rank).last, group)}"
        for rank in group.ranks
        if group.name in evidence.get_rank(rank).last
    )
    return (
        f"{format_ranks(ranks_that_completed).capitalize()} completed {call} of the {group.label}, and "
        f"{format_ranks(other_ranks)} entered it and did not complete it: their calls do not fit, or a "
        f"message was lost. The last calls in this group: {counts}. Dumps with every call "
        "(TORCH_INCLUDE_ONLY_ACTIVE=0) show which rank left the order."
    )


def _describe_last(last_numbers: Mapping[str, int], group: GroupOfRanks) -> str:
    """Return `no. 113` for a rank's last call in a group; `none` if it made none."""
    number = last_numbers.get(group.name, 0)
    return f"no. {number}" if number > 0 else "none"


def _find_ranks_that_completed(
    evidence: HangEvidence, group: GroupOfRanks, call: RecordedCall
) -> list[int]:
    """Return the ranks of the group whose last completed collective is this call or a later one."""
    return [
        rank
        for rank in group.ranks
        if evidence.get_rank(rank).completed.get(group.name, -1) >= call.number
    ]


def _judge_pipeline_communication(waits: Waits) -> HangVerdict:
    """Return the verdict on pipeline stages whose communication with each other does not end."""
    ranks = waits.ranks_in_pipeline_communication
    return _make_verdict(
        waits,
        sentence=f"Ranks {join_ranks(ranks)} are in point-to-point communication between their pipeline "
        "stages, and nobody completed it.",
        suspects=ranks,
        kind=HangKind.NOT_COMPLETED,
    )


def _make_undecided_verdict(evidence: HangEvidence, reason: str) -> HangVerdict:
    """Return an undecided verdict: the reason, then where each rank is, then ranks whose lines are missing."""
    sentences = [reason, describe_ranks(evidence)]
    missing_ranks = sorted({*evidence.reported_elsewhere} - {*evidence.ranks})
    if missing_ranks:
        names = format_ranks(missing_ranks)
        sentences.append(f"{names.capitalize()} reported a timeout first: add the log of {names}.")
    return HangVerdict(HangOutcome.UNDECIDED, " ".join(filter(None, sentences)))


def _make_verdict(
    waits: Waits,
    *,
    sentence: str,
    culprits: Sequence[int] = (),
    suspects: Sequence[int] = (),
    kind: HangKind | None = None,
    call: RecordedCall | None = None,
    location: StepPlace | None = None,
    next_step: str = "",
) -> HangVerdict:
    """Return a verdict. Waiting ranks, group, call, module and the chain of waits come from the graph of waits.

    Args:
        call: The call that the verdict is about; by default the earliest call in which others wait for
            the culprits and suspects.
        location: Where in the step the cause is; by default where the first culprit or the call is.
        next_step: What to look at next; by default what the kind of hang and the culprits' stacks suggest.
    """
    evidence, roots = waits.evidence, [*culprits, *suspects]
    waits_for_roots = waits.direct_waits_for(roots)
    if call is None and waits_for_roots:
        call = waits_for_roots[0].call
    is_pipeline_communication = bool(waits_for_roots) or not set(roots).isdisjoint(
        waits.ranks_in_pipeline_communication
    )
    group_label = call_name = None
    if call:
        group_label, call_name = evidence.groups[call.group].label, str(call)
    elif is_pipeline_communication:
        group_label, call_name = "pipeline group", "exchange between stages"
    waiting = sorted((waits.ranks_in_calls | waits.ranks_waiting_for(roots)) - {*culprits})
    is_decided = bool(culprits) or kind is HangKind.NOT_COMPLETED
    return HangVerdict(
        verdict=HangOutcome.HANG if is_decided or waiting else HangOutcome.UNDECIDED,
        sentence=sentence.strip(),
        culprits=tuple(culprits),
        suspects=tuple(suspects),
        waiting=tuple(waiting),
        kind=kind,
        group=group_label,
        call=call_name,
        module=_find_module(
            waits, culprits, call, location, is_pipeline_communication=is_pipeline_communication
        ),
        chain=_describe_chain(waits, roots),
        next_step=next_step or _choose_next_step(evidence, culprits, kind),
    )


def _choose_next_step(
    evidence: HangEvidence, culprits: Sequence[int], kind: HangKind | None
) -> str:
    """Return a sentence on what to look at next; empty if the kind of hang is unknown.

    The sentence does not ask for the culprits' stacks if the evidence has them.
    """
    if kind is None:
        return ""
    stacks = [evidence.get_rank(rank).stack for rank in culprits]
    has_all_stacks = bool(stacks) and all(stacks)
    if kind is not HangKind.NEVER_ENTERED or not has_all_stacks:
        return _NEXT_STEPS[kind]
    parts = {locate_frames(stack).part for stack in stacks}
    for part, step in _NEXT_STEPS_IN_PARTS.items():
        if part in parts:
            return step
    return _STEP_AT_LINE


def _find_module(
    waits: Waits,
    culprits: Sequence[int],
    call: RecordedCall | None,
    location: StepPlace | None,
    *,
    is_pipeline_communication: bool,
) -> str | None:
    """Return the module at `location`, or that of the first culprit, or that of the call; None if unknown.

    Pipeline communication without a recorded call gives PIPELINE_EXCHANGE if no location is known.
    """
    locations: list[StepPlace] = []
    if location:
        locations.append(location)
    else:
        locations += [locate_rank(waits, rank) for rank in culprits[:1]]
        if call:
            locations.append(locate_call(waits.evidence, call))
    for candidate in locations:
        if candidate.is_known:
            return candidate.module or None
    if is_pipeline_communication and call is None:
        return PIPELINE_EXCHANGE
    return None


def _describe_chain(waits: Waits, roots: Sequence[int]) -> tuple[str, ...]:
    """Return one line per call in which ranks wait: the waiting ranks, the awaited ranks, and the call.

    Calls in which a rank waits for one of `roots` come first. At most SHOWN_WAITS lines are returned, and no line
    mentions the others.
    """
    waits_by_call: dict[str, list[Wait]] = {}
    for waits_of_rank in waits.waits_by_rank.values():
        for wait in waits_of_rank:
            waits_by_call.setdefault(describe_wait_call(waits.evidence, wait), []).append(wait)
    lines_on_roots: list[str] = []
    other_lines: list[str] = []
    for call, waits_in_call in waits_by_call.items():
        awaited_ranks = {wait.awaited_rank for wait in waits_in_call}
        line = (
            f"{describe_waiting_ranks(waits_in_call)} for {format_ranks(awaited_ranks)} in {call}"
        )
        if awaited_ranks.isdisjoint(roots):
            other_lines.append(line)
        else:
            lines_on_roots.append(line)
    return tuple([*lines_on_roots, *other_lines][:SHOWN_WAITS])
