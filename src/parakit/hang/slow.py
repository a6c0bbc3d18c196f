"""Find the rank that slows the iterations of a run down: it computes for longer, and its peers wait for it.

The input is `time.json` of a run folder, with the seconds of every rank's iteration and those of its waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from parakit.artifacts.measurements import RankTime, TimeRecord, read_measurements
from parakit.artifacts.run import read_run
from parakit.formatting.units import milliseconds

LEAST_SLOWDOWN = 0.2
"""Fraction of an iteration by which a rank must slow it down to be named."""
FEWEST_ITERATIONS = 4
"""Steady iterations that must have been measured. In fewer, one pause of the machine decides."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that spends more time outside of communication per iteration than its peers."""

    rank: int
    own_seconds: float
    """Seconds per iteration outside of communication."""
    peer_seconds: float
    """Median of the same seconds over the other ranks of its pipeline stage."""
    slowdown: float
    """Fraction of an iteration that its peers wait for it."""

    @property
    def sentence(self) -> str:
        """Sentence on the rank, its seconds and those of its peers, which begins with a small letter."""
        return (
            f"rank {self.rank} slows iterations by {self.slowdown:.0%}: it computes for "
            f"{milliseconds(self.own_seconds)} of each, and the other ranks of its stage for "
            f"{milliseconds(self.peer_seconds)}"
        )


def find_slow_rank(folder: Path) -> SlowRank | None:
    """Return the rank that slows a run's iterations by more than LEAST_SLOWDOWN; None if no rank does.

    Ranks of one pipeline stage are compared with each other, because they have equal work. None is also returned
    if the run folder has no times, or times of fewer than FEWEST_ITERATIONS iterations.
    """
    try:
        spec = read_run(folder).spec
        record = read_measurements(folder, TimeRecord)
    except (OSError, msgspec.DecodeError):
        return None
    num_stages = spec.parallelism.pipeline
    ranks_per_stage = max(1, len(record.ranks) // num_stages)
    ranks_by_stage: dict[int, list[RankTime]] = {}
    for rank in record.ranks:
        ranks_by_stage.setdefault(rank.rank // ranks_per_stage, []).append(rank)
    slowest_per_stage = [_find_slowest(ranks) for ranks in ranks_by_stage.values()]
    slow_ranks = [slow for slow in slowest_per_stage if slow is not None]
    slowest = max(slow_ranks, key=lambda slow: slow.slowdown, default=None)
    if slowest is None or slowest.slowdown <= LEAST_SLOWDOWN:
        return None
    return slowest


def _find_slowest(ranks: list[RankTime]) -> SlowRank | None:
    """Return the rank that spends most time outside of communication; None for a single rank or too few iterations."""
    has_times = all(
        len(rank.processor_seconds) >= FEWEST_ITERATIONS and rank.iteration_seconds > 0
        for rank in ranks
    )
    if len(ranks) < 2 or not has_times:
        return None
    slowest = max(ranks, key=_own_seconds)
    peer_seconds = median(_own_seconds(rank) for rank in ranks if rank is not slowest)
    own_seconds = _own_seconds(slowest)
    return SlowRank(
        rank=slowest.rank,
        own_seconds=own_seconds,
        peer_seconds=peer_seconds,
        slowdown=(own_seconds - peer_seconds) / slowest.iteration_seconds,
    )


def _own_seconds(rank: RankTime) -> float:
    """Return the seconds of an iteration that a rank spends outside of communication."""
    return rank.iteration_seconds - sum(rank.communication_seconds.values())
