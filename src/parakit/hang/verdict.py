"""The verdict: who stopped, who merely waits, of what kind it is, and what to look at next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from parakit.formatting.units import plural
from parakit.hang.behind import RankBehind, find_ranks_behind
from parakit.hang.evidence import GroupOfRanks, HangEvidence, RankEvidence, RecordedCall
from parakit.hang.location import place_of_a_call, place_of_departure, place_of_rank
from parakit.hang.order import CallMismatch, Departure, are_usual, find_departure, find_mismatch
from parakit.hang.place import EXCHANGE, StepPlace, place_of, place_of_call
from parakit.hang.waits import Wait, Waits, find_waits, is_in_collective
from parakit.hang.wording import (
    describe_ranks,
    described,
    listed,
    ranks_of,
    where_of,
    who_waits,
)

QUIET_SECONDS = 5.0
"""A job that made a call less long before it was asked is at work."""
USUAL_GAPS = 3
"""So many times its longest pause between calls is no hang either."""

SHOWN_WAITS = 12

_UNRECORDED = {"send", "recv", "batch_isend_irecv", "_p2p_ops", "_communicate"}
_UNRECORDED |= {"new_group", "init_process_group"}
"""torch's and Megatron's functions whose calls a flight recorder may not have (gloo's has no send)."""


class HangOutcome(StrEnum):
    """Whether it hangs."""

    HANG = "hang"
    SLOW = "slow"
    NONE = "no hang"
    UNDECIDED = "undecided"


class HangKind(StrEnum):
    """How it hangs."""

    NEVER_ENTERED = "never entered"
    OTHER_COLLECTIVE = "other collective"
    NOT_COMPLETED = "entered and not completed by anybody"
    NOT_COMPLETED_HERE = "entered, completed by the others, not by this rank"
    TWO_ROOTS = "two roots"


_NEXT_STEPS = {
    HangKind.NEVER_ENTERED: "Look at that rank's stack (py-spy dump) and its machine's kernel log: it "
    "is dead, stopped, in host code or in a kernel.",
    HangKind.OTHER_COLLECTIVE: "Compare the two places in the code: a branch that depends on the rank or on "
    "data skips, adds or changes a call.",
    HangKind.NOT_COMPLETED: "Look at the network between these ranks: NCCL_DEBUG=INFO, links, interfaces, "
    "firewall; the code agrees.",
    HangKind.NOT_COMPLETED_HERE: "Look at that rank's device: its own log for a CUDA error, nvidia-smi, "
    "and its machine's kernel log (Xid).",
    HangKind.TWO_ROOTS: "Look at each rank by itself: none waits for another.",
}


@dataclass(frozen=True)
class HangVerdict:
    """What `JSON=1` prints, and the chain below it."""

    verdict: HangOutcome
    sentence: str
    culprits: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    """One of them stopped; the evidence does not say which."""
    waiting: tuple[int, ...] = ()
    kind: HangKind | None = None
    group: str | None = None
    call: str | None = None
    module: str | None = None
    chain: tuple[str, ...] = ()

    @property
    def next_step(self) -> str:
        """What to look at, in a line."""
        return _NEXT_STEPS[self.kind] if self.kind else ""


def judge(evidence: HangEvidence) -> HangVerdict:
    """Who stopped; of a job that is over, whose call ended it."""
    waits = find_waits(evidence)
    if stopped := [rank for rank, one in evidence.ranks.items() if one.is_stopped]:
        alone = [root[0] for root in waits.roots if len(root) == 1]
        apart = [rank for rank in alone if rank not in waits.in_calls]
        return _judge_roots(waits, [*stopped, *apart, *_stuck(waits)])
    mismatch = find_mismatch(evidence)
    if mismatch and (waits.in_calls or evidence.is_over):
        return _judge_mismatch(waits, mismatch)
    if evidence.is_over:
        return _judge_misfit(waits)
    return _at_work(waits) or _judge_graph(waits)


def _judge_misfit(waits: Waits) -> HangVerdict:
    """Of a call that did not fit: who left the usual order, or nothing where nobody else did."""
    evidence = waits.evidence
    if left := find_departure(evidence, evidence.ranks):
        return _judge_departure(waits, left, "")
    silent = [rank for rank in evidence.everybody if not evidence.of(rank).calls]
    others = evidence.everybody - {*silent}
    if len(silent) != 1 or not are_usual(evidence, others):
        text = "Ranks were ended by a failure, and what is here does not say whose call it was."
        return HangVerdict(HangOutcome.UNDECIDED, f"{text} {describe_ranks(evidence)}".strip())
    text = f"{evidence.name(silent[0])} left no calls, and those of all others are the usual ones."
    last = [evidence.of(rank).calls[-1] for rank in others]
    met = [call for call in last if silent[0] in evidence.groups[call.group].ranks]
    call = min(met, key=lambda call: call.created_ns, default=None)
    return _verdict(waits, (), silent, HangKind.OTHER_COLLECTIVE, text, call)


def _judge_graph(waits: Waits) -> HangVerdict:
    roots = waits.roots
    ranks_behind = find_ranks_behind(waits)
    if not ranks_behind and len(roots) == 1 and len(roots[0]) > 1:
        return _judge_circle(waits, roots[0])
    # What all ranks of a group entered is completed without them: they wait for the network.
    held = _held(waits)
    ranks = [rank for root in roots for rank in root if rank not in held]
    if ranks:
        ranks += _stuck(waits)
    if ranks_behind:
        return _judge_ranks_behind(waits, ranks_behind, ranks)
    found = _judge_roots(waits, ranks) if ranks else _without_roots(waits)
    if found.culprits or not waits.in_calls:
        return found
    left = find_departure(waits.evidence, waits.evidence.ranks)
    return _judge_departure(waits, left, found.sentence) if left else found


def _held(waits: Waits) -> set[int]:
    """The ranks in a call that all of its group entered, and that nobody waits for in it."""
    edges = (wait for each in waits.edges.values() for wait in each)
    awaited = {(wait.awaited, wait.call.group, wait.call.number) for wait in edges if wait.call}
    return {
        rank
        for group, call in waits.incomplete
        for rank in group.ranks
        if (rank, call.group, call.number) not in awaited
        and (call.group, call.number)
        in [(one.group, one.number) for one in waits.evidence.of(rank).pending]
    }


def _judge_ranks_behind(
    waits: Waits, ranks_behind: Sequence[RankBehind], roots: Sequence[int]
) -> HangVerdict:
    """Name the ranks whose device is behind their peers', and the roots that are not among them."""
    evidence = waits.evidence
    behind = [rank_behind.rank for rank_behind in ranks_behind]
    other_roots = sorted({*roots} - {*behind})
    stopped = [
        rank
        for rank in other_roots
        if evidence.of(rank).is_known and not _may_just_wait(waits, rank)
    ]
    sentences = [_describe_rank_behind(waits, rank_behind) for rank_behind in ranks_behind]
    sentences += [_root_sentence(waits, rank) for rank in stopped]
    return _verdict(
        waits,
        suspects=[rank for rank in other_roots if rank not in stopped],
        culprits=[*behind, *stopped],
        kind=HangKind.TWO_ROOTS if stopped else HangKind.NOT_COMPLETED_HERE,
        sentence=" ".join(sentences),
        call=ranks_behind[0].first_call,
    )


def _describe_rank_behind(waits: Waits, behind: RankBehind) -> str:
    """Return the sentences on which call the rank did not complete, and how many calls it is behind."""
    evidence, call = waits.evidence, behind.first_call
    group = evidence.groups[call.group]
    calls = f"{plural(behind.num_calls, 'call')} in {plural(behind.num_groups, 'group')}"
    return (
        f"{evidence.name(behind.rank)} entered {call} of its {group.label}, which "
        f"{ranks_of(behind.peers)} completed and it did not{_where(waits, evidence.of(behind.rank))}; "
        f"it is {calls} behind. {_crowd(waits, behind.rank)}"
    ).strip()


def _stuck(waits: Waits) -> list[int]:
    """Ranks in no call that made none for longer than is usual, though nobody waits for them yet."""
    evidence = waits.evidence
    allowed = _usual_pause(evidence)
    return [
        rank
        for rank, one in evidence.ranks.items()
        if one.stack and one.calls and one.dumped_ns and rank not in waits.in_calls
        if rank not in waits.exchanges
        if (one.dumped_ns - one.calls[-1].created_ns) / 1e9 > allowed
    ]


def _usual_pause(evidence: HangEvidence) -> float:
    """Seconds, by pauses between a rank's calls that came twice at one place: start-up's come once."""
    longest = 0.0
    for one in evidence.ranks.values():
        gaps: dict[object, list[float]] = {}
        for before, after in pairwise(call for call in one.calls if call.created_ns):
            gap = (after.created_ns - before.created_ns) / 1e9
            gaps.setdefault(after.signature, []).append(gap)
        longest = max([longest, *(sorted(each)[-2] for each in gaps.values() if len(each) > 1)])
    return max(QUIET_SECONDS, USUAL_GAPS * longest)


def _at_work(waits: Waits) -> HangVerdict | None:
    """No hang: nobody is in a call, or calls were made just before the dumps."""
    evidence, everybody = waits.evidence, waits.evidence.ranks.values()
    if evidence.timed_out:
        return None
    if asked := [one.dumped_ns for one in everybody if one.dumped_ns and one.calls]:
        quiet = (min(asked) - max(one.calls[-1].created_ns for one in everybody if one.calls)) / 1e9
        allowed = _usual_pause(evidence)
        if quiet < allowed:
            text = f"No sign of a hang: the last call was entered {max(quiet, 0):.1f} s before the dumps"
            return HangVerdict(
                HangOutcome.SLOW, f"{text}, and pauses of {allowed:.0f} s are usual here."
            )
    if waits.in_calls:
        return None
    if all(one.calls and not one.stack for one in everybody):
        numbers = len({tuple(sorted(one.last.items())) for one in everybody})
        if numbers <= len(evidence.groups):
            return HangVerdict(HangOutcome.NONE, "Nobody hangs: every recorded call was completed.")
    text = "No rank is in a call that is not done; what is here does not show a hang."
    return HangVerdict(HangOutcome.UNDECIDED, f"{text} {describe_ranks(evidence)}".strip())


def _judge_roots(waits: Waits, roots: Sequence[int]) -> HangVerdict:
    ranks = sorted(set(roots))
    names = ranks_of(ranks).capitalize()
    known = [rank for rank in ranks if waits.evidence.of(rank).is_known]
    if not known and len(ranks) > 1:
        # Nothing of them is here, and what others wait for fits each of them.
        text = f"{names} left nothing, and {plural(len(waits.in_calls), 'rank')} wait for them"
        return _verdict(waits, ranks, (), None, f"{text}; which of them stopped is not known.")
    if any(_may_just_wait(waits, rank) for rank in known):
        if {*ranks} <= {*waits.exchanges}:
            return _judge_point_to_point(waits)
        text = f"{names}: others wait for it, and it waits in a call that was not recorded."
        return _verdict(waits, ranks, (), None, text)
    culprits = known or ranks
    kind = HangKind.TWO_ROOTS if len(culprits) > 1 else HangKind.NEVER_ENTERED
    text = " ".join(_root_sentence(waits, rank) for rank in culprits)
    return _verdict(waits, [r for r in ranks if r not in culprits], culprits, kind, text)


def _may_just_wait(waits: Waits, rank: int) -> bool:
    one = waits.evidence.of(rank)
    if one.is_stopped or rank not in waits.in_calls or not is_in_collective(one.stack):
        return False
    # Other collectives would have been recorded as entered.
    return not one.calls or any(f.function.rpartition(".")[2] in _UNRECORDED for f in one.stack)


def _root_sentence(waits: Waits, rank: int) -> str:
    evidence, one, into = waits.evidence, waits.evidence.of(rank), waits.calls_into([rank])
    stopped = " was stopped by a signal (SIGSTOP)" + " and" * bool(into)
    text = evidence.name(rank) + (stopped if one.is_stopped else "" if into else " stopped")
    if into and (call := into[0].call):
        group = evidence.groups[call.group]
        inside = [w for w in into if w.call and w.call.group == group.name]
        is_in = one.last.get(group.name, -1) >= call.number and not one.is_stopped
        did = "entered, and its device never began," if is_in else "never entered"
        text += f" {did} {call} of its {group.label}, in which {who_waits(inside)}"
        if place := str(place_of_a_call(evidence, call)):
            text += f" ({place})"
    elif into:
        text += f" never came to the exchange in which {who_waits(into)}"
    return f"{text}{_where(waits, one)}. {_crowd(waits, rank)}"


def _where(waits: Waits, one: RankEvidence) -> str:
    if one.stack and (place := place_of_rank(waits, one.rank)).line:
        return f"; it is in {place}"
    last = len(one.calls) - 1
    if one.calls and (left := str(place_of_call(one.calls, last, waits.evidence.stage))):
        return f"; its last call was in {left}"
    return "; it left nothing" if not one.is_known else ""


def _crowd(waits: Waits, root: int) -> str:
    behind = waits.behind([root])
    if not behind:
        return ""
    groups = {w.call.group for rank in behind for w in waits.edges.get(rank, ()) if w.call}
    inside = f" in {plural(len(groups), 'group')}" if groups else ""
    return f"{plural(len(behind), 'rank')} wait{'s' * (len(behind) == 1)} for it{inside}."


def _judge_mismatch(waits: Waits, mismatch: CallMismatch) -> HangVerdict:
    (rank, call), (other, another) = mismatch.first, mismatch.second
    left = find_departure(waits.evidence, mismatch.group.ranks)
    departed = left.rank if left else _minority(waits.evidence, mismatch)
    text = (
        f"{waits.evidence.name(rank)} called {described(call)} as no. {call.number} of its "
        f"{mismatch.group.label} where rank {other} called {described(another)}: another "
        f"{mismatch.differs}."
    )
    if departed is None:
        return _verdict(waits, (rank, other), (), HangKind.OTHER_COLLECTIVE, text, call)
    text = f"{waits.evidence.name(departed)} left the order of calls. {text}"
    found, usual = (call, another) if departed == rank else (another, call)
    place = (
        place_of_departure(waits.evidence, left) if left else place_of_a_call(waits.evidence, usual)
    )
    return _verdict(waits, (), (departed,), HangKind.OTHER_COLLECTIVE, text, found, place)


def _minority(evidence: HangEvidence, mismatch: CallMismatch) -> int | None:
    """The one rank of three or more whose call is not the others', if all of them are known."""
    if not mismatch.group.is_whole:
        return None
    by_call: dict[object, list[int]] = {}
    for rank in mismatch.group.ranks:
        calls = evidence.of(rank).collectives(mismatch.group.name)
        if call := calls.get(mismatch.first[1].number):
            by_call.setdefault((call.operation, call.sizes, call.dtypes), []).append(rank)
    counts = sorted(by_call.values(), key=len)
    return counts[0][0] if len(counts) == 2 and len(counts[0]) == 1 < len(counts[1]) else None


def _judge_circle(waits: Waits, circle: tuple[int, ...]) -> HangVerdict:
    inside = [w for rank in circle for w in waits.edges[rank] if w.awaited in circle]
    text = "; ".join(
        f"rank {wait.rank} waits for rank {wait.awaited} in {where_of(waits.evidence, wait)}"
        for wait in inside[:4]
    )
    if left := find_departure(waits.evidence, circle):
        return _judge_departure(waits, left, f"{text}.")
    sentence = f"Ranks {listed(circle)} wait for each other: {text}."
    return _verdict(waits, circle, (), HangKind.OTHER_COLLECTIVE, sentence)


def _judge_departure(waits: Waits, left: Departure, more: str) -> HangVerdict:
    usual = f"{left.usual.operation} of {left.usual.description or 'its group'}"
    sentence = (
        f"{waits.evidence.name(left.rank)} left the order of calls: it called "
        f"{described(left.call)} where {usual} usually follows. {more}"
    )
    place = place_of_departure(waits.evidence, left)
    return _verdict(waits, (), (left.rank,), HangKind.OTHER_COLLECTIVE, sentence, left.meant, place)


def _without_roots(waits: Waits) -> HangVerdict:
    evidence = waits.evidence
    for group, call in waits.incomplete:
        # Another call under that number; one that fits is recorded where the whole order is.
        done = [
            rank
            for rank in _completed_by(evidence, group, call)
            if call.number not in evidence.of(rank).collectives(group.name)
        ]
        if done:
            return _judge_different_ends(waits, group, call, done)
    if whole := [pair for pair in waits.incomplete if pair[0].is_whole]:
        group, call = min(whole, key=lambda pair: pair[1].created_ns)
        done = _completed_by(evidence, group, call)
        text = (
            f"All ranks of the {group.label} ({listed(group.ranks)}) entered {call}, and "
            f"{f'only {ranks_of(done)}' if done else 'nobody'} completed it."
        )
        return _verdict(waits, group.ranks, (), HangKind.NOT_COMPLETED, text, call)
    apart = [r for r, one in evidence.ranks.items() if one.stack and r not in waits.in_calls]
    if waits.exchanges and not apart:
        return _judge_point_to_point(waits)
    if len(apart) == 1 and len(waits.in_calls) > 0:
        place = place_of(evidence.of(apart[0]).stack)
        text = f"{evidence.name(apart[0])} is in {place}; all other ranks wait in a collective."
        return _verdict(waits, (), apart, HangKind.NEVER_ENTERED, text)
    text = "Ranks wait in calls, and what is here does not say for whom."
    text = f"{text} {describe_ranks(evidence)}"
    return _verdict(waits, apart, (), None, text)


def _judge_different_ends(
    waits: Waits, group: GroupOfRanks, call: RecordedCall, done: Sequence[int]
) -> HangVerdict:
    evidence = waits.evidence
    others = [rank for rank in group.ranks if rank not in done]
    counts = ", ".join(f"rank {r} {evidence.of(r).last.get(group.name, 0)}" for r in group.ranks)
    text = (
        f"{ranks_of(done).capitalize()} completed {call} of the {group.label}, and {ranks_of(others)} "
        f"entered it and did not: what they called does not fit, or a message was lost. Calls entered "
        f"there: {counts}. Dumps with every call (TORCH_INCLUDE_ONLY_ACTIVE=0) say who left the order."
    )
    return _verdict(waits, group.ranks, (), None, text, call)


def _completed_by(evidence: HangEvidence, group: GroupOfRanks, call: RecordedCall) -> list[int]:
    ranks = group.ranks
    return [r for r in ranks if evidence.of(r).completed.get(group.name, -1) >= call.number]


def _judge_point_to_point(waits: Waits) -> HangVerdict:
    ranks = listed(waits.exchanges)
    text = f"Ranks {ranks} are in an exchange between their stages, and nobody completed it."
    return _verdict(waits, waits.exchanges, (), HangKind.NOT_COMPLETED, text)


def _verdict(
    waits: Waits,
    suspects: Sequence[int],
    culprits: Sequence[int],
    kind: HangKind | None,
    sentence: str,
    call: RecordedCall | None = None,
    place: StepPlace | None = None,
) -> HangVerdict:
    evidence, roots = waits.evidence, [*culprits, *suspects]
    into = waits.calls_into(roots)
    call = call or (into[0].call if into else None)
    exchanging = [wait.rank for wait in into] or sorted({*roots} & {*waits.exchanges})
    places = [place_of_rank(waits, rank) for rank in culprits[:1]]
    places += [place_of_a_call(evidence, call)] if call else []
    places = [place] if place else places
    module = next((one.module for one in places if one.is_known), "")
    if not call and exchanging and not any(one.is_known for one in places):
        module = EXCHANGE
    waiting = tuple(sorted((waits.in_calls | waits.behind(roots)) - {*culprits}))
    decided = bool(culprits) or kind is HangKind.NOT_COMPLETED
    return HangVerdict(
        HangOutcome.HANG if decided or waiting else HangOutcome.UNDECIDED,
        sentence.strip(),
        tuple(culprits),
        tuple(suspects),
        waiting,
        kind,
        evidence.groups[call.group].label if call else "pipeline group" if exchanging else None,
        str(call) if call else "exchange between stages" if exchanging else None,
        module or None,
        _chain(waits, roots),
    )


def _chain(waits: Waits, roots: Sequence[int]) -> tuple[str, ...]:
    """Who waits for whom in a call, one line for all groups of a kind; for the roots first."""
    found: dict[str, list[Wait]] = {}
    for wait in (one for each in waits.edges.values() for one in each):
        found.setdefault(where_of(waits.evidence, wait), []).append(wait)
    near = sorted(found, key=lambda where: not {w.awaited for w in found[where]} & {*roots})
    return tuple(
        f"{who_waits(found[where])} for {ranks_of({w.awaited for w in found[where]})} in {where}"
        for where in near[:SHOWN_WAITS]
    )
