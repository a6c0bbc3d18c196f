"""Messages between the planner and the process that dry-runs a rank, one JSON line each.

The planner writes a `RankJob` to the process `python -m parakit.dryrun` and reads a `RankAnswer` from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from parakit.artifacts.measurements import RankCommunication, RankMemory


@dataclass(frozen=True)
class RankJob:
    """One rank of one world, which the process is to run for one iteration."""

    flags: tuple[str, ...]
    """Megatron's arguments."""
    world_size: int
    rank: int


@dataclass(frozen=True)
class RankReport:
    """Parameters, calls and memory of one rank in one steady iteration."""

    rank: int
    parameters: int
    communication: RankCommunication
    memory: RankMemory
    in_flight: int
    """Micro batches (of a virtual stage, if there are several) held between forward and backward."""
    seconds: float
    """Wall time of the dry run itself, without imports."""
    process_bytes: int
    """Largest resident size of the process that made it."""


class RankAnswer(msgspec.Struct, frozen=True):
    """Answer to a job: a report, or the error that kept the rank from finishing."""

    report: RankReport | None = None
    error: str = ""
