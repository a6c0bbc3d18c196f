"""The evidence of a job that hangs or failed: recorded calls and stacks per rank, and the process groups.

`HangEvidence` holds one `RankEvidence` per rank. Every part may be missing for any rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from parakit.config.groups import group_name


class Frame(NamedTuple):
    """One frame of a Python stack."""

    function: str
    file: str
    line: int


class ThreadStack(NamedTuple):
    """A thread of a rank besides the main one."""

    name: str
    frames: tuple[Frame, ...]
    """Innermost first."""


FOLDERS_THAT_COUNT_CALLS = ("parakit/accounting/", "tools/ledger/")
"""Folders of the code that counts communication calls. Every call passes through its frames.

The second is the folder's name in older versions of this kit, whose dumps and stacks are still read.
"""


def counts_calls(file: str) -> bool:
    """Return True if a frame's source file belongs to the code that counts communication calls."""
    return any(folder in file for folder in FOLDERS_THAT_COUNT_CALLS)


UNNAMED_GROUP = "that the log does not name"
"""Name of a group of which no line of a log has a name. Rank 0 may be in another group than the others."""
UNKNOWN_GROUP = "unknown to rank"
"""Beginning of the name of the unknown group of one rank's call."""
UNKNOWN_OPERATION = "collective"
"""Operation of a call of which a log has only the number."""

Signature = tuple[object, ...]
"""Group, operation, sizes, dtypes and innermost frames of a call. Ranks of a group make equal ones."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One communication call of one rank, as a flight recorder keeps it."""

    group: str
    """torch's name of the group, unique in the job."""
    description: str
    """torch's description of the group, which the groups of one split share: `TENSOR_MODEL_PARALLEL_GROUP`."""
    operation: str
    """`all_reduce`, `send`, …"""
    number: int
    """Sequence number among the group's collectives, or among its point-to-point calls.

    0 if unknown, as in the lines of torch 1.12's watchdog."""
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    created_ns: int = 0
    is_done: bool = False
    is_started: bool = False
    """True if the device had begun the call. Always False if torch does not time calls."""
    is_point_to_point: bool = False
    """True for a send, a receive, and the end of a batch of them."""
    peer: int | None = None
    """The peer's rank in the group, for a point-to-point call; None if unknown."""
    frames: tuple[Frame, ...] = ()
    """Frames of Megatron and of the user's code, innermost first."""
    is_reported: bool = False
    """True if a line of a log reports the call. The lines of other ranks may be missing there."""

    def __str__(self) -> str:
        return f"{self.operation} no. {self.number}" if self.number else self.operation

    @property
    def signature(self) -> Signature:
        """Return what equal calls have in common, also across the groups of one split.

        The group's description stands for the group.
        """
        sizes = () if self.operation in _OPERATIONS_OF_ANY_SIZE else self.sizes
        return self.description, self.operation, sizes, self.dtypes, self.frames[:SIGNATURE_FRAMES]


class Progress(NamedTuple):
    """Numbers of the last collectives that a rank entered and completed in a group, as NCCL counts them.

    NCCL's dumps may leave out completed calls, but these numbers include them.
    """

    entered: int
    """Number of the last collective that the rank entered."""
    completed: int
    """Number of the last collective that the rank's device completed."""


ComparedCalls = tuple[tuple[int, RecordedCall], tuple[int, RecordedCall]]
"""Two ranks, each with its call, that torch compared and found to differ."""

_OPERATIONS_OF_ANY_SIZE = ("all_to_all",)
"""Operations whose sizes depend on the data, such as on the tokens per expert."""
SIGNATURE_FRAMES = 6
"""Innermost frames that distinguish one call's place in the code from another's."""


@dataclass
class RankEvidence:
    """Evidence of one rank, filled in file by file. Every part may be missing."""

    rank: int
    calls: tuple[RecordedCall, ...] = ()
    """The last recorded calls, in the order in which the rank made them."""
    stack: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first.

    If the main thread waits for autograd, the frames of autograd's thread come first."""
    communicating_threads: tuple[ThreadStack, ...] = ()
    """Other threads that are in a collective, such as that of an asynchronous save."""
    dumped_ns: int | None = None
    """Time of the dump of calls in ns since 1970; None if unknown."""
    is_stopped: bool = False
    """True if a signal had stopped the rank's process."""
    progress: Mapping[str, Progress] = field(default_factory=dict)
    """NCCL's counts by group name; empty for other backends."""

    @property
    def is_known(self) -> bool:
        """True if the rank left calls, a stack or counts, or was seen stopped."""
        return bool(self.calls or self.stack or self.is_stopped or self.progress)

    @property
    def is_only_counted(self) -> bool:
        """True if the only evidence of the rank is a log's count of its calls."""
        return bool(self.progress) and not (
            self.calls or self.stack or self.dumped_ns or self.is_stopped
        )

    def collectives(self, group: str) -> dict[int, RecordedCall]:
        """Return the rank's collectives in a group, by number."""
        return {
            call.number: call
            for call in self.calls
            if call.group == group and not call.is_point_to_point
        }

    @cached_property
    def last(self) -> Mapping[str, int]:
        """Number of the last collective that the rank entered, by group name."""
        counted = {group: progress.entered for group, progress in self.progress.items()}
        return _find_last_numbers(self.calls, counted)

    @cached_property
    def completed(self) -> Mapping[str, int]:
        """Number of the last collective that the rank completed, by group name."""
        counted = {group: progress.completed for group, progress in self.progress.items()}
        return _find_last_numbers((call for call in self.calls if call.is_done), counted)

    @cached_property
    def pending(self) -> tuple[RecordedCall, ...]:
        """Calls that the rank entered and did not complete.

        A collective counts as completed if a later collective of its group is completed.
        """
        return tuple(
            call
            for call in self.calls
            if not call.is_done
            and (call.is_point_to_point or call.number > self.completed.get(call.group, -1))
        )


def _find_last_numbers(calls: Iterable[RecordedCall], counted: Mapping[str, int]) -> dict[str, int]:
    """Return the number of the last collective by group: of `calls`, or of `counted` if that is higher."""
    numbers = {call.group: call.number for call in calls if not call.is_point_to_point}
    for group, number in counted.items():
        numbers[group] = max(number, numbers.get(group, number))
    return numbers


@dataclass(frozen=True)
class GroupOfRanks:
    """A process group of torch.distributed, with its ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]
    is_whole: bool = True
    """True if a dump lists all ranks of the group. Otherwise `ranks` are only those with calls in it."""

    @property
    def is_pipeline(self) -> bool:
        """True if the ranks of the group are the stages of a pipeline."""
        return self.description.startswith("PIPELINE_MODEL_PARALLEL_GROUP")

    @property
    def is_unknown(self) -> bool:
        """True if the group stands for the unknown group of one rank's call."""
        return self.name.startswith(UNKNOWN_GROUP)

    @property
    def label(self) -> str:
        """Name of the group in Megatron's terms, such as `tensor-parallel group`."""
        if self.is_unknown:
            return "group that the log does not name"
        short = group_name(self.description)
        return _LABELS.get(short, f"group {short or self.name}")


_LABELS = {
    "tp": "tensor-parallel group",
    "cp": "context-parallel group",
    "dp": "data-parallel group",
    "dp_cp": "data-parallel group (with context parallel)",
    "pp": "pipeline group",
    "ep": "expert-parallel group",
    "expert_dp": "expert data-parallel group",
    "mp": "model-parallel group",
    "embedding": "embedding group",
    "world": "group of all ranks",
}


class StepStage(NamedTuple):
    """Work of one pipeline stage: its layers, and its micro batches per iteration."""

    layers: int
    micro_batches: int


@dataclass(frozen=True)
class HangEvidence:
    """The evidence of all ranks of a job, its groups, and the files that could not be read."""

    ranks: Mapping[int, RankEvidence]
    groups: Mapping[str, GroupOfRanks]
    refused: tuple[str, ...] = ()
    """A sentence for each file that could not be read."""
    timed_out: tuple[str, ...] = ()
    """Lines of NCCL's watchdog on timeouts, one per rank."""
    stage: StepStage | None = None
    """Work of a pipeline stage; None if unknown, or if there are virtual stages."""
    is_over: bool = False
    """True if the job failed, so that its ranks were ended wherever they were."""
    compared: tuple[ComparedCalls, ...] = ()
    """Pairs of calls that torch compared and found to differ, by the logs."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Sentences on ranks that ended by themselves, by the logs: a signal killed them, or they raised an error."""
    stuck: tuple[int, ...] = ()
    """Ranks whose watchdog was blocked, by the logs."""
    asked_ns: int | None = None
    """Time at which the ranks were asked for their stacks, in ns since 1970; None if unknown."""
    begun: Mapping[int, RecordedCall] = field(default_factory=dict)
    """The last call that each rank began, of an unknown group, by the logs."""
    is_begun_in_one_group: bool = True
    """False if the ranks began calls of several groups, so that the numbers in `begun` cannot be compared."""
    differing: Mapping[int, RecordedCall] = field(default_factory=dict)
    """Calls by rank that torch found to differ from a call that no log shows."""
    blocked_later: tuple[int, ...] = ()
    """Ranks whose watchdog was blocked after a call had timed out, by the logs."""
    reported_elsewhere: tuple[int, ...] = ()
    """Ranks that reported a timeout first, by the lines of other ranks."""

    def get_rank(self, rank: int) -> RankEvidence:
        """Return the evidence of a rank; empty evidence if the rank left nothing."""
        return self.ranks.get(rank, RankEvidence(rank))

    @cached_property
    def all_ranks(self) -> frozenset[int]:
        """All ranks with evidence, and all ranks that share a group with them."""
        in_groups = (rank for group in self.groups.values() for rank in group.ranks)
        return frozenset({*self.ranks, *in_groups})

    def name_rank(self, rank: int) -> str:
        """Return a rank's name with its index in every known group, such as `Rank 12 (dp 1, pp 2, tp 0)`."""
        indices: dict[str, int] = {}
        for group in self.groups.values():
            short_name = group_name(group.description)
            is_named = short_name in ("dp", "cp", "pp", "tp") and len(group.ranks) > 1
            if is_named and rank in group.ranks:
                indices[short_name] = group.ranks.index(rank)
        coordinates = ", ".join(f"{name} {index}" for name, index in sorted(indices.items()))
        return f"Rank {rank} ({coordinates})" if coordinates else f"Rank {rank}"
