"""Messages between the planner and the process that dry-runs a rank, one JSON line each.

The planner writes a `RankJob` to the process `python -m parakit.dryrun` and reads a `RankAnswer` from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from parakit.artifacts.measurements import RankCommunication, RankMemory


@dataclass(frozen=True)
class RankJob:
    """Order to dry-run one rank of a world of ranks for one iteration."""

    flags: tuple[str, ...]
    """Megatron's command-line arguments."""
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
    """Micro batches between forward and backward at once, per virtual stage if there are several."""
    seconds: float
    """Wall time of the dry run itself, without imports."""
    process_bytes: int
    """Largest resident size of the process that made the dry run."""


class RankAnswer(msgspec.Struct, frozen=True):
    """Answer to a job: the report, or None and the error that stopped the rank."""

    report: RankReport | None = None
    error: str = ""
