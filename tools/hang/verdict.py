"""The verdict: who stopped, who merely waits, of what kind it is, and what to look at next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from tools.hang.evidence import Evidence, RankEvidence, RecordedCall, Wait
from tools.hang.order import Departure, Mismatch, find_departures, find_mismatch
from tools.hang.place import Place, place_of, place_of_call
from tools.hang.waits import Waits, find_waits, is_in_collective

QUIET_SECONDS = 5.0
"""A job that made a call less long before it was asked is at work."""
USUAL_GAPS = 3
"""So many times its longest pause between calls is no hang either."""


_UNRECORDED = {"send", "recv", "batch_isend_irecv", "_p2p_ops", "_communicate"}
_UNRECORDED |= {"new_group", "init_process_group"}
"""torch's and Megatron's functions whose calls a flight recorder may not have (gloo's has no send)."""


class Outcome(StrEnum):
    """Whether it hangs."""

    HANG = "hang"
    SLOW = "slow"
    NONE = "no hang"
    UNDECIDED = "undecided"


class Kind(StrEnum):
    """How it hangs."""

    NEVER_ENTERED = "never entered"
    OTHER_COLLECTIVE = "other collective"
    NOT_COMPLETED = "entered and not completed by anybody"
    TWO_ROOTS = "two roots"


_NEXT_STEPS = {
    Kind.NEVER_ENTERED: "Look at that rank's stack (py-spy dump) and its machine's kernel log: it "
    "is dead, stopped, in host code or in a kernel.",
    Kind.OTHER_COLLECTIVE: "Compare the two places in the code: a branch that depends on the rank or on "
    "data skips, adds or changes a call.",
    Kind.NOT_COMPLETED: "Look at the network between these ranks: NCCL_DEBUG=INFO, links, interfaces, "
    "firewall; the code agrees.",
    Kind.TWO_ROOTS: "Look at each rank by itself: none waits for another.",
}


@dataclass(frozen=True)
class Verdict:
    """What `JSON=1` prints, and the chain below it."""

    verdict: Outcome
    sentence: str
    culprits: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    """One of them stopped; the evidence does not say which."""
    waiting: tuple[int, ...] = ()
    kind: Kind | None = None
    group: str | None = None
    call: str | None = None
    module: str | None = None
    chain: tuple[str, ...] = field(default=())

    @property
    def next_step(self) -> str:
        """What to look at, in a line."""
        return _NEXT_STEPS[self.kind] if self.kind else ""


def judge(evidence: Evidence) -> Verdict:
    """Who stopped."""
    waits = find_waits(evidence)
    stopped = tuple(rank for rank, one in evidence.ranks.items() if one.is_stopped)
    if not stopped and (at_work := _at_work(evidence, waits)):
        return at_work
    if stopped:
        return _of_roots(evidence, waits, [(rank,) for rank in stopped])
    mismatch = find_mismatch(evidence)
    if mismatch and waits.in_calls:
        return _of_mismatch(evidence, waits, mismatch)
    roots = waits.roots
    circle = next((root for root in roots if len(root) > 1), None)
    if circle and len(roots) == 1:
        return _of_circle(evidence, waits, circle)
    if roots:
        return _of_roots(evidence, waits, [(rank,) for root in roots for rank in root])
    return _without_roots(evidence, waits)


def _at_work(evidence: Evidence, waits: Waits) -> Verdict | None:
    """No hang: nobody is in a call, or calls were made just before the dumps."""
    if evidence.timed_out:
        return None
    everybody = evidence.ranks.values()
    asked = [one.dumped_ns for one in everybody if one.dumped_ns and one.calls]
    if asked:
        quiet = (min(asked) - max(one.calls[-1].created_ns for one in everybody if one.calls)) / 1e9
        allowed = max(QUIET_SECONDS, USUAL_GAPS * _longest_gap(everybody))
        if quiet < allowed:
            text = f"Nobody hangs: the last call was entered {max(quiet, 0):.1f} s before the dumps"
            return Verdict(Outcome.SLOW, f"{text}, and pauses of {allowed:.0f} s are usual here.")
    if waits.in_calls:
        return None
    if all(one.calls and not one.stack for one in everybody):
        numbers = len({tuple(sorted(one.last.items())) for one in everybody})
        if numbers <= len(evidence.groups):
            return Verdict(Outcome.NONE, "Nobody hangs: every recorded call was completed.")
    return Verdict(
        Outcome.UNDECIDED,
        "No rank is in a call that is not done; what is here does not show a hang.",
        suspects=(),
    )


def _longest_gap(ranks: Iterable[RankEvidence]) -> float:
    """Seconds between a rank's calls, of pauses that came twice at one place: start-up's come once."""
    longest = 0.0
    for one in ranks:
        gaps: dict[object, list[float]] = {}
        for before, after in pairwise(call for call in one.calls if call.created_ns):
            gap = (after.created_ns - before.created_ns) / 1e9
            gaps.setdefault(after.signature, []).append(gap)
        longest = max([longest, *(sorted(each)[-2] for each in gaps.values() if len(each) > 1)])
    return longest


def _of_roots(evidence: Evidence, waits: Waits, roots: Sequence[tuple[int, ...]]) -> Verdict:
    ranks = tuple(sorted({rank for root in roots for rank in root}))
    known = tuple(rank for rank in ranks if evidence.of(rank).is_known)
    if not known and len(ranks) > 1:
        # Nothing of them is here, and what others wait for fits each of them.
        text = f"{_names(ranks)} left nothing, and {_count(len(waits.in_calls))} wait for them"
        return _verdict(
            evidence, waits, ranks, (), None, f"{text}; which of them stopped is not known."
        )
    if any(_may_just_wait(evidence, waits, rank) for rank in known):
        text = f"{_names(ranks)}: others wait for it, and it waits in a call that was not recorded."
        return _verdict(evidence, waits, ranks, (), None, text)
    culprits = known or ranks
    kind = Kind.TWO_ROOTS if len(culprits) > 1 else Kind.NEVER_ENTERED
    sentences = [_root_sentence(evidence, waits, rank) for rank in culprits]
    others = tuple(rank for rank in ranks if rank not in culprits)
    return _verdict(evidence, waits, others, culprits, kind, " ".join(sentences))


def _may_just_wait(evidence: Evidence, waits: Waits, rank: int) -> bool:
    one = evidence.of(rank)
    if one.is_stopped or rank not in waits.in_calls or not is_in_collective(one.stack):
        return False
    # Other collectives would have been recorded as entered.
    return not one.calls or any(f.function.rpartition(".")[2] in _UNRECORDED for f in one.stack)


def _root_sentence(evidence: Evidence, waits: Waits, rank: int) -> str:
    into = waits.calls_into([rank])
    one = evidence.of(rank)
    text = evidence.name(rank)
    if one.is_stopped:
        text += " was stopped by a signal (SIGSTOP)"
        text += " and" if into else ""
    if into:
        wait = into[0]
        if wait.call is None:
            text += f" never came to the exchange in which {_name_of_waiting(into)}"
        else:
            group = evidence.groups[wait.call.group]
            inside = [w for w in into if w.call and w.call.group == group.name]
            is_in = one.last.get(group.name, -1) >= wait.call.number and not one.is_stopped
            did = "entered, and its device never began," if is_in else "never entered"
            text += f" {did} {_title(wait.call)} of its {group.label}, in which "
            text += _name_of_waiting(inside)
            if str(place := _place(evidence, wait)):
                text += f" ({place})"
    elif not one.is_stopped:
        text += " stopped"
    where = _where(evidence, one)
    return f"{text}{where}. {_crowd(waits, [rank])}"


def _where(evidence: Evidence, one: RankEvidence) -> str:
    if one.stack and not one.is_stopped and (place := place_of(one.stack)).line:
        return f"; it is in {place}"
    if one.calls and str(place := _left(evidence, one)):
        return f"; its last call was in {place}"
    return "; it left nothing" if not one.is_known else ""


def _place(evidence: Evidence, wait: Wait) -> Place:
    """Of the call that a rank waits in."""
    calls = evidence.of(wait.rank).calls
    at = next((i for i, call in enumerate(calls) if call is wait.call), None)
    return Place() if at is None else place_of_call(calls, at, evidence.layers_a_stage)


def _left(evidence: Evidence, one: RankEvidence) -> Place:
    return place_of_call(one.calls, len(one.calls) - 1, evidence.layers_a_stage)


def _crowd(waits: Waits, roots: Sequence[int]) -> str:
    behind = waits.behind(roots)
    groups = {w.call.group for rank in behind for w in waits.edges.get(rank, ()) if w.call}
    if not behind:
        return ""
    many = "ranks wait" if len(behind) > 1 else "rank waits"
    inside = f" in {len(groups)} group{'s' if len(groups) > 1 else ''}" if groups else ""
    return f"{len(behind)} {many} for it{inside}."


def _of_mismatch(evidence: Evidence, waits: Waits, mismatch: Mismatch) -> Verdict:
    (rank, call), (other, another) = mismatch.first, mismatch.second
    departed = _alone(find_departures(evidence, mismatch.group.ranks)) or _minority(
        evidence, mismatch
    )
    text = (
        f"{evidence.name(rank)} called {_described(call)} as no. {call.number} of its "
        f"{mismatch.group.label} where rank {other} called {_described(another)}: another "
        f"{mismatch.differs}."
    )
    if departed is not None:
        text = f"{evidence.name(departed)} left the order of calls. {text}"
    suspects = () if departed is not None else (rank, other)
    culprits = () if departed is None else (departed,)
    found = call if departed in (None, rank) else another
    return _verdict(evidence, waits, suspects, culprits, Kind.OTHER_COLLECTIVE, text, found)


def _minority(evidence: Evidence, mismatch: Mismatch) -> int | None:
    """The one rank of three or more whose call is not the others'."""
    by_call: dict[object, list[int]] = {}
    for rank in mismatch.group.ranks:
        for call in evidence.of(rank).calls:
            is_it = call.number == mismatch.first[1].number and not call.is_point_to_point
            if call.group == mismatch.group.name and is_it:
                key = (call.operation, call.sizes, call.dtypes)
                by_call.setdefault(key, []).append(rank)
    counts = sorted(by_call.values(), key=len)
    return counts[0][0] if len(counts) == 2 and len(counts[0]) == 1 < len(counts[1]) else None


def _alone(departures: Sequence[Departure]) -> int | None:
    return departures[0].rank if len(departures) == 1 else None


def _of_circle(evidence: Evidence, waits: Waits, circle: tuple[int, ...]) -> Verdict:
    departures = find_departures(evidence, circle)
    inside = [w for rank in circle for w in waits.edges[rank] if w.awaited in circle]
    text = "; ".join(_wait_text(evidence, wait) for wait in inside[:4])
    one = _alone(departures)
    if one is None:
        sentence = f"Ranks {_listed(circle)} wait for each other: {text}."
        return _verdict(evidence, waits, circle, (), Kind.OTHER_COLLECTIVE, sentence)
    left = departures[0]
    sentence = (
        f"{evidence.name(one)} left the order of calls: it called {_described(left.call)} where "
        f"{left.usual.operation} of {left.usual.group or 'its group'} usually follows. {text}."
    )
    return _verdict(evidence, waits, (), (one,), Kind.OTHER_COLLECTIVE, sentence, left.call)


def _without_roots(evidence: Evidence, waits: Waits) -> Verdict:
    if waits.incomplete:
        group, call = min(waits.incomplete, key=lambda pair: pair[1].created_ns)
        text = (
            f"All ranks of the {group.label} ({_listed(group.ranks)}) entered {_title(call)}, and "
            "nobody completed it."
        )
        return _verdict(evidence, waits, group.ranks, (), Kind.NOT_COMPLETED, text, call)
    apart = [r for r, one in evidence.ranks.items() if one.stack and r not in waits.in_calls]
    if len(apart) == 1 and len(waits.in_calls) > 0:
        place = place_of(evidence.of(apart[0]).stack)
        text = f"{evidence.name(apart[0])} is in {place}; all other ranks wait in a collective."
        return _verdict(evidence, waits, (), tuple(apart), Kind.NEVER_ENTERED, text)
    text = "Ranks wait in calls, and what is here does not say for whom."
    return _verdict(evidence, waits, tuple(apart), (), None, text)


def _verdict(
    evidence: Evidence,
    waits: Waits,
    suspects: Sequence[int],
    culprits: Sequence[int],
    kind: Kind | None,
    sentence: str,
    call: RecordedCall | None = None,
) -> Verdict:
    roots = [*culprits, *suspects]
    into = waits.calls_into(roots)
    shown = call or next((w.call for w in into if w.call), None)
    place = _module_of(evidence, culprits, shown)
    waiting = tuple(sorted((waits.in_calls | waits.behind(roots)) - {*culprits}))
    decided = bool(culprits) or kind is Kind.NOT_COMPLETED
    return Verdict(
        Outcome.HANG if decided or waiting else Outcome.UNDECIDED,
        sentence.strip(),
        tuple(culprits),
        tuple(suspects),
        waiting,
        kind,
        evidence.groups[shown.group].label if shown else None,
        _title(shown) if shown else None,
        place.module or None,
        tuple(_wait_text(evidence, one) for one in _chain(waits)),
    )


def _module_of(evidence: Evidence, culprits: Sequence[int], call: RecordedCall | None) -> Place:
    """Of the call that was not entered; of the culprit's stack where there is no such call."""
    if call is not None and call.frames:
        return place_of(call.frames)
    return place_of(evidence.of(culprits[0]).stack) if culprits else Place()


def _chain(waits: Waits) -> list[Wait]:
    """A wait for each pair of a group and the rank awaited in it."""
    found: dict[tuple[str, int], Wait] = {}
    for ranks in waits.edges.values():
        for wait in ranks:
            found.setdefault((wait.call.group if wait.call else "", wait.awaited), wait)
    return list(found.values())[:40]


def _wait_text(evidence: Evidence, wait: Wait) -> str:
    if wait.call is None:
        return f"rank {wait.rank} waits for rank {wait.awaited} in an exchange between stages"
    group = evidence.groups[wait.call.group]
    return f"rank {wait.rank} waits for rank {wait.awaited} in {_title(wait.call)} of the {group.label}"


def _title(call: RecordedCall) -> str:
    return f"{call.operation} no. {call.number}"


def _described(call: RecordedCall) -> str:
    sizes = " and ".join(str(list(size)) for size in call.sizes) or "nothing"
    return f"{call.operation} of {sizes}{' ' + '/'.join(call.dtypes) if call.dtypes else ''}"


def _name_of_waiting(waits: Sequence[Wait]) -> str:
    ranks = sorted({wait.rank for wait in waits})
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {_listed(ranks)} wait"


def _names(ranks: Sequence[int]) -> str:
    return f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {_listed(ranks)}"


def _count(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def _listed(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > len(shown):
        return ", ".join(shown) + f" and {len(ranks) - len(shown)} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
