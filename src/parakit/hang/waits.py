"""Find which rank waits for which other rank.

The input is what each rank left behind: its recorded calls (flight recorder) and its Python stack. The
result is a graph, `Waits`, with an edge from each waiting rank to each rank it waits for. A rank that
others wait for, and that waits for nobody, is a root: it stopped the job. Ranks that wait for each
other in a cycle are a root together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import dropwhile

from parakit.hang.evidence import (
    Frame,
    GroupOfRanks,
    HangEvidence,
    RankEvidence,
    RecordedCall,
    counts_calls,
)

TORCH_DISTRIBUTED = "/torch/distributed/"
TORCH_CHECKPOINT = "/torch/distributed/checkpoint/"
FILES_THAT_CALL_COLLECTIVES = ("/torch/", "megatron_patches/")
PIPELINE_FILES = ("p2p_communication", "pipeline_parallel/schedules")
NUM_INNERMOST_FRAMES = 6
EXCEPTION_HOOK = "_distributed_excepthook"

UNRECORDED_FUNCTIONS = frozenset(
    {
        *("send", "recv", "batch_isend_irecv", "_p2p_ops", "_communicate"),
        *("new_group", "init_process_group"),
    }
)
"""torch's and Megatron's functions whose calls a flight recorder may lack (gloo's has no send)."""

PREVIOUS_STAGE, NEXT_STAGE = -1, +1
AWAITED_STAGES: Mapping[str, set[int]] = {
    "send_forward": {NEXT_STAGE},
    "recv_backward": {NEXT_STAGE},
    "send_forward_recv_backward": {NEXT_STAGE},
    "recv_forward": {PREVIOUS_STAGE},
    "send_backward": {PREVIOUS_STAGE},
    "send_backward_recv_forward": {PREVIOUS_STAGE},
    "send_forward_backward_recv_forward_backward": {PREVIOUS_STAGE, NEXT_STAGE},
    "send_forward_recv_forward": {PREVIOUS_STAGE, NEXT_STAGE},
    "send_backward_recv_backward": {PREVIOUS_STAGE, NEXT_STAGE},
    "pp_pre_forward": {PREVIOUS_STAGE},
    "pp_post_forward": {NEXT_STAGE},
    "pp_pre_backward": {NEXT_STAGE},
    "pp_post_backward": {PREVIOUS_STAGE},
    "forward_backward_pipelining_with_interleaving": {PREVIOUS_STAGE, NEXT_STAGE},
}
"""Pipeline stages that each of Megatron's communication functions waits for, relative to its own.

The functions are those of `p2p_communication.py`, then those of `schedules.py`. If several of them
are on a stack, the one that comes first in this table decides.
"""


@dataclass(frozen=True)
class Wait:
    """One edge of the graph: `rank` waits for `awaited_rank`."""

    rank: int
    awaited_rank: int
    call: RecordedCall | None = field(compare=False)
    """The call in which `rank` waits; None if only the rank's stack shows the wait."""


@dataclass(frozen=True)
class Waits:
    """The graph of waiting ranks in one job: which rank waits for which other rank, and in which call."""

    evidence: HangEvidence
    waits_by_rank: Mapping[int, tuple[Wait, ...]]
    """Waits by the rank that waits. Ranks that a signal had stopped are missing."""
    ranks_in_calls: frozenset[int]
    """Ranks inside an unfinished call, by records or stacks, even if the awaited rank is unknown."""
    unfinished_collectives: tuple[tuple[GroupOfRanks, RecordedCall], ...]
    """Unfinished collectives in which some rank waits for nobody: its whole group has entered."""
    ranks_in_pipeline_communication: tuple[int, ...] = ()
    """Ranks in pipeline communication with a neighbour whose stack shows communication with them."""

    @property
    def roots(self) -> list[tuple[int, ...]]:
        """Ranks that cause the waits: first single ranks that wait for nobody, then cycles of ranks."""
        awaited_ranks = {
            wait.awaited_rank for waits in self.waits_by_rank.values() for wait in waits
        }
        single_ranks = [rank for rank in sorted(awaited_ranks) if not self.waits_by_rank.get(rank)]
        roots: list[tuple[int, ...]] = [(rank,) for rank in single_ranks]
        explained = self.ranks_waiting_for(single_ranks)
        unexplained = {
            rank for rank, waits in self.waits_by_rank.items() if waits and rank not in explained
        }
        while unexplained:
            cycle = self._follow_to_cycle(min(unexplained), unexplained)
            roots.append(cycle)
            unexplained -= self.ranks_waiting_for(cycle) | set(cycle)
        return roots

    def ranks_waiting_for(self, roots: Iterable[int]) -> set[int]:
        """Return the ranks that wait for `roots`, directly or through other ranks."""
        waiting_ranks: dict[int, list[int]] = {}
        for rank, waits in self.waits_by_rank.items():
            for wait in waits:
                waiting_ranks.setdefault(wait.awaited_rank, []).append(rank)
        reached = set(roots)
        to_visit = list(reached)
        while to_visit:
            for rank in waiting_ranks.get(to_visit.pop(), ()):
                if rank not in reached:
                    reached.add(rank)
                    to_visit.append(rank)
        return reached - set(roots)

    def direct_waits_for(self, roots: Iterable[int]) -> list[Wait]:
        """Return the waits of ranks that wait directly for `roots`, ordered by the time of the call.

        Waits without a recorded call come first.
        """
        awaited_ranks = set(roots)
        waits = [
            wait
            for waits_of_rank in self.waits_by_rank.values()
            for wait in waits_of_rank
            if wait.awaited_rank in awaited_ranks
        ]
        return sorted(waits, key=lambda wait: wait.call.created_ns if wait.call else 0)

    def _follow_to_cycle(self, start: int, ranks: set[int]) -> tuple[int, ...]:
        """Follow waits within `ranks` from `start` until a rank repeats; return the ranks of this cycle, sorted."""
        path = [start]
        while True:
            next_rank = next(
                wait.awaited_rank
                for wait in self.waits_by_rank[path[-1]]
                if wait.awaited_rank in ranks
            )
            if next_rank in path:
                return tuple(sorted(path[path.index(next_rank) :]))
            path.append(next_rank)


def find_waits(evidence: HangEvidence) -> Waits:
    """Build the graph of waits from the evidence of all ranks."""
    waits_by_rank: dict[int, tuple[Wait, ...]] = {}
    ranks_in_calls: set[int] = set()
    ranks_in_exchange: set[int] = set()
    unfinished_collectives: dict[tuple[str, int], tuple[GroupOfRanks, RecordedCall]] = {}
    for rank, rank_evidence in evidence.ranks.items():
        if rank_evidence.is_stopped:
            continue
        waits: dict[int, Wait] = {}
        for call in rank_evidence.pending:
            group = evidence.groups[call.group]
            awaited_ranks = _awaited_in_call(evidence, rank, call, group)
            for awaited in awaited_ranks:
                waits.setdefault(awaited, Wait(rank, awaited, call))
            if not awaited_ranks and not call.is_point_to_point:
                unfinished_collectives.setdefault((call.group, call.number), (group, call))
        waits |= _waits_of_failed_call(evidence, rank_evidence)
        has_recorded_call = bool(waits or rank_evidence.pending)
        if not has_recorded_call:
            # gloo's flight recorder keeps no point-to-point call, so pipeline communication shows only
            # in the stack.
            waits, is_in_exchange = _waits_in_pipeline(evidence, rank_evidence)
            if is_in_exchange:
                ranks_in_exchange.add(rank)
        if rank_evidence.pending or waits or is_in_collective(rank_evidence.stack):
            ranks_in_calls.add(rank)
        waits_by_rank[rank] = tuple(waits.values())
    return Waits(
        evidence,
        waits_by_rank,
        ranks_in_calls=frozenset(ranks_in_calls),
        unfinished_collectives=tuple(unfinished_collectives.values()),
        ranks_in_pipeline_communication=tuple(sorted(ranks_in_exchange)),
    )


def _waits_in_pipeline(
    evidence: HangEvidence, rank_evidence: RankEvidence
) -> tuple[dict[int, Wait], bool]:
    """Return a rank's waits for neighbouring stages, by its stack, and whether it communicates with one of them.

    Two stages that communicate with each other do not wait for each other.
    """
    rank = rank_evidence.rank
    waits: dict[int, Wait] = {}
    is_in_exchange = False
    for neighbour in _pipeline_neighbours(evidence, rank_evidence):
        neighbour_evidence = evidence.get_rank(neighbour)
        if rank in _pipeline_neighbours(evidence, neighbour_evidence):
            is_in_exchange = True
        else:
            waits[neighbour] = Wait(rank, neighbour, None)
    return waits, is_in_exchange


def is_in_collective(stack: Iterable[Frame]) -> bool:
    """Return True if the stack ends in a torch.distributed call or in pipeline communication.

    `stack` is innermost first. An empty stack gives False.
    """
    frames = dropwhile(lambda frame: counts_calls(frame.file), stack)
    innermost_frames = tuple(frames)[:NUM_INNERMOST_FRAMES]
    if not innermost_frames:
        return False
    innermost_file = innermost_frames[0].file
    # The wait of a point-to-point request is C++ code, so the innermost Python frame is Megatron's.
    if any(name in innermost_file for name in PIPELINE_FILES):
        return True
    # If torch has called back into other code, that code is computing and not waiting.
    if not any(folder in innermost_file for folder in FILES_THAT_CALL_COLLECTIVES):
        return False
    distributed_files = [
        frame.file for frame in innermost_frames if TORCH_DISTRIBUTED in frame.file
    ]
    # torch's code for checkpoints is in the same folder, and waits for a disk unless it calls further.
    return bool(distributed_files) and TORCH_CHECKPOINT not in distributed_files[0]


def is_in_recorded_collective(stack: Sequence[Frame]) -> bool:
    """Return True if the stack ends in a collective that every flight recorder keeps, so in no message."""
    functions = {frame.function.rpartition(".")[2] for frame in stack}
    return is_in_collective(stack) and functions.isdisjoint(UNRECORDED_FUNCTIONS)


def _waits_of_failed_call(evidence: HangEvidence, rank_evidence: RankEvidence) -> dict[int, Wait]:
    """Return a rank's waits for its lost peers, by peer; empty if no exception is ending the rank.

    The exception comes from the rank's last call, which is recorded as completed. Lost peers are the ranks of
    this call's group that recorded no call at all.
    """
    is_raising = any(frame.function == EXCEPTION_HOOK for frame in rank_evidence.stack)
    if not is_raising or not rank_evidence.calls:
        return {}
    failed_call = rank_evidence.calls[-1]
    peers = evidence.groups[failed_call.group].ranks
    lost_peers = [peer for peer in peers if not evidence.get_rank(peer).calls]
    return {peer: Wait(rank_evidence.rank, peer, failed_call) for peer in lost_peers}


def _awaited_in_call(
    evidence: HangEvidence, rank: int, call: RecordedCall, group: GroupOfRanks
) -> tuple[int, ...]:
    """Return the ranks that `rank` waits for in this unfinished call; empty if none is missing."""
    if not call.is_point_to_point:
        peers = (peer for peer in group.ranks if peer != rank)
        return tuple(peer for peer in peers if _must_be_awaited(evidence.get_rank(peer), call))
    if call.peer is None or call.peer >= len(group.ranks):
        return ()
    peer = group.ranks[call.peer]
    counterpart = "recv" if call.operation == "send" else "send"
    expected = (call.group, counterpart, group.ranks.index(rank))
    for peer_call in evidence.get_rank(peer).pending:
        if (peer_call.group, peer_call.operation, peer_call.peer) == expected:
            return ()
    return (peer,)


def _must_be_awaited(peer: RankEvidence, call: RecordedCall) -> bool:
    """Return True if other ranks must wait for `peer` in this collective.

    This is so if `peer` has not entered the call. It is also so if the device of `peer` lags behind. The waiting rank's
    device has then begun the call, and the device of `peer` has begun none of its pending calls.
    """
    # A signal stopped the peer's process. It was continued only to write its dump, so a call in that
    # dump may have been entered after the job had already hung.
    if peer.is_stopped or peer.last.get(call.group, -1) < call.number:
        return True
    if not call.is_started or any(pending.is_started for pending in peer.pending):
        return False
    return any(
        pending.number == call.number
        for pending in peer.pending
        if pending.group == call.group and not pending.is_point_to_point
    )


def _pipeline_neighbours(evidence: HangEvidence, rank_evidence: RankEvidence) -> tuple[int, ...]:
    """Return the ranks of the stages that a rank communicates with, by its stack; empty if there are none."""
    if rank_evidence.is_stopped or not is_in_collective(rank_evidence.stack):
        return ()
    stage_steps = _find_stage_steps(rank_evidence)
    for group in evidence.groups.values():
        if group.is_pipeline and rank_evidence.rank in group.ranks:
            stage, num_stages = group.ranks.index(rank_evidence.rank), len(group.ranks)
            neighbours = {group.ranks[(stage + step) % num_stages] for step in stage_steps}
            return tuple(sorted(neighbours - {rank_evidence.rank}))
    return ()


def _find_stage_steps(rank_evidence: RankEvidence) -> AbstractSet[int]:
    """Return the steps to the stages that a rank communicates with, by the functions in its stack.

    A step is 1 to the next stage and -1 to the previous one. The result is empty if no function is known.
    """
    functions = {
        frame.function.rpartition(".")[2]
        for frame in rank_evidence.stack
        if any(name in frame.file for name in PIPELINE_FILES)
    }
    for function, steps in AWAITED_STAGES.items():
        if function in functions:
            return steps
    return frozenset()
