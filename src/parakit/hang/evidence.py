"""What is known of a job at one moment: each rank's recorded calls and stack, and the groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from parakit.config.groups import group_name


class Frame(NamedTuple):
    """One Python frame."""

    function: str
    file: str
    line: int


FOLDERS_THAT_COUNT_CALLS = ("parakit/accounting/", "tools/ledger/")
"""Folders of this kit's counting of calls, through which every call passes. Its frames say nothing.

The second is the folder's name in kits before `src/parakit`, whose dumps and stacks are still read.
"""


def counts_calls(file: str) -> bool:
    """Return True if the source file of a frame belongs to this kit's counting of calls."""
    return any(folder in file for folder in FOLDERS_THAT_COUNT_CALLS)


Signature = tuple[object, ...]
"""What ranks of a group must agree on in a call, and at its end where it was made."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of one rank, as a flight recorder keeps it."""

    group: str
    """torch's name of the group, unique in the job."""
    description: str
    operation: str
    """`all_reduce`, `send`, …"""
    number: int
    """Its place in the sequence of its group's collectives, or of its point-to-point calls.

    0 if unknown, as in the lines of torch 1.12's watchdog."""
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ()
    created_ns: int = 0
    is_done: bool = False
    is_started: bool = False
    """Whether the device had begun it; never where torch times no calls."""
    is_point_to_point: bool = False
    """Whether it has peers of its own rather than a group: also the end of a batch of exchanges."""
    peer: int | None = None
    """Of a point-to-point call: the other's rank in the group."""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""

    def __str__(self) -> str:
        return f"{self.operation} no. {self.number}" if self.number else self.operation

    @property
    def signature(self) -> Signature:
        """Of its group the description, which groups that split the same way share."""
        sizes = () if self.operation in _OF_ANY_SIZE else self.sizes
        return self.description, self.operation, sizes, self.dtypes, self.frames[:SITE_FRAMES]


class Progress(NamedTuple):
    """How far a rank came in a group, as NCCL counts it: its dumps may leave out what is done."""

    entered: int
    completed: int
    """The number of the last collective."""


_OF_ANY_SIZE = ("all_to_all",)
"""Operations whose sizes are those of the data, such as the tokens for each expert."""
SITE_FRAMES = 6
"""Innermost frames that tell one call's place in the code from another's."""


@dataclass
class RankEvidence:
    """What one rank left, filled in file by file. Everything may be missing."""

    rank: int
    calls: tuple[RecordedCall, ...] = ()
    """The last ones, in the order they were made in."""
    stack: tuple[Frame, ...] = ()
    """Of its main thread, innermost first."""
    dumped_ns: int | None = None
    is_stopped: bool = False
    """Whether a signal had stopped its process."""
    progress: Mapping[str, Progress] = field(default_factory=dict)
    """By group, where NCCL counts it."""

    @property
    def is_known(self) -> bool:
        """Whether it left anything that says where it was."""
        return bool(self.calls or self.stack or self.is_stopped or self.progress)

    @property
    def is_only_counted(self) -> bool:
        """Return True if a log's count of the rank's calls is all that it left."""
        return bool(self.progress) and not (
            self.calls or self.stack or self.dumped_ns or self.is_stopped
        )

    def collectives(self, group: str) -> dict[int, RecordedCall]:
        """Those of a group, by number."""
        return {c.number: c for c in self.calls if c.group == group and not c.is_point_to_point}

    @cached_property
    def last(self) -> Mapping[str, int]:
        """By group, the number of the last collective that it entered."""
        counted = {group: one.entered for group, one in self.progress.items()}
        return _furthest(self.calls, counted)

    @cached_property
    def completed(self) -> Mapping[str, int]:
        """By group, the number of the last collective that it completed."""
        counted = {group: one.completed for group, one in self.progress.items()}
        return _furthest((call for call in self.calls if call.is_done), counted)

    @cached_property
    def pending(self) -> tuple[RecordedCall, ...]:
        """Calls entered and not done; a later one of the same group that is done ends them."""
        made = [call for call in self.calls if not call.is_done]
        done = self.completed
        return tuple(c for c in made if c.is_point_to_point or c.number > done.get(c.group, -1))


def _furthest(calls: Iterable[RecordedCall], counted: Mapping[str, int]) -> dict[str, int]:
    """By group, the number of the last collective among these calls, or NCCL's count if that is more."""
    found = {call.group: call.number for call in calls if not call.is_point_to_point}
    return found | {group: max(n, found.get(group, n)) for group, n in counted.items()}


@dataclass(frozen=True)
class GroupOfRanks:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]
    is_whole: bool = True
    """Whether a dump lists its ranks; else those whose calls are here."""

    @property
    def is_pipeline(self) -> bool:
        """Whether its ranks are the stages of a pipeline, which exchange messages in it."""
        return self.description.startswith("PIPELINE_MODEL_PARALLEL_GROUP")

    @property
    def label(self) -> str:
        """As Megatron's users call it: `tensor-parallel group`."""
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
    """What a rank of a pipeline computes."""

    layers: int
    micro_batches: int
    """Of an iteration."""


@dataclass(frozen=True)
class HangEvidence:
    """All ranks' evidence, and what was refused."""

    ranks: Mapping[int, RankEvidence]
    groups: Mapping[str, GroupOfRanks]
    refused: tuple[str, ...] = ()
    """A sentence for each file that could not be read."""
    timed_out: tuple[str, ...] = ()
    """Watchdogs' own words, one a rank."""
    stage: StepStage | None = None
    is_over: bool = False
    """Whether the job failed, and its ranks were ended wherever they were."""

    def of(self, rank: int) -> RankEvidence:
        """What a rank left; empty where it left nothing."""
        return self.ranks.get(rank, RankEvidence(rank))

    @cached_property
    def everybody(self) -> frozenset[int]:
        """Ranks that left something, and those that are with them in a group."""
        in_groups = (rank for group in self.groups.values() for rank in group.ranks)
        return frozenset({*self.ranks, *in_groups})

    def name(self, rank: int) -> str:
        """`Rank 12 (dp 1, pp 2, tp 0)`, as far as its groups tell."""
        places: dict[str, int] = {}
        for group in self.groups.values():
            short = group_name(group.description)
            if short in ("dp", "cp", "pp", "tp") and len(group.ranks) > 1 and rank in group.ranks:
                places[short] = group.ranks.index(rank)
        known = ", ".join(f"{short} {index}" for short, index in sorted(places.items()))
        return f"Rank {rank} ({known})" if known else f"Rank {rank}"
