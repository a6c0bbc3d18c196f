"""Where each rank's iteration went: the breakdown of the DeepSpeed report, from `time.json`.

Phases are Megatron's own timers on the host's clock; on a GPU a phase ends when its kernels were
launched unless the timers synchronise, so there the shares are the launching thread's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from parakit.artifacts.measurements import CommunicationRecord, RankTime, TimeRecord
from parakit.costs import Operation, Phase


@dataclass(frozen=True)
class TimeShares:
    """One rank's steady iteration by phase."""

    rank: int
    iteration_seconds: float
    phases: Mapping[Phase, float]
    """Share of the iteration; communication and waiting inside a phase are part of it. Sums to 1."""
    exposed_communication: float
    """Share spent in calls, and in waiting for them, over all phases; it lies inside `phases`."""

    @property
    def published_fractions(self) -> tuple[float, float, float]:
        """Forward, backward with gradient sync, optimizer: shares of the three, as that report has."""
        forward = self.phases.get(Phase.FORWARD, 0.0)
        backward = self.phases.get(Phase.BACKWARD, 0.0) + self.phases.get(Phase.GRADIENT_SYNC, 0.0)
        optimizer = self.phases.get(Phase.OPTIMIZER, 0.0)
        whole = forward + backward + optimizer or 1.0
        return forward / whole, backward / whole, optimizer / whole


def compute_time_shares(record: TimeRecord) -> tuple[TimeShares, ...]:
    """Shares of every rank that had a steady iteration."""
    found = []
    for rank in record.ranks:
        if rank.iteration_seconds > 0:
            # Phases are summed from their own clock readings, a few microseconds beside the iteration's.
            whole = sum(rank.phase_seconds.values()) or rank.iteration_seconds
            phases = {phase: seconds / whole for phase, seconds in rank.phase_seconds.items()}
            exposed = sum(rank.communication_seconds.values()) / whole
            found.append(TimeShares(rank.rank, rank.iteration_seconds, phases, exposed))
    return tuple(found)


def add_pipeline_waits(times: TimeRecord, communication: CommunicationRecord | None) -> TimeRecord:
    """Count waiting for neighbouring stages as such where no timer of Megatron's is around it.

    The interleaved schedule waits for its messages between its timers; the communication ledger has
    these waits by call.
    """
    # Messages between stages; a ring's are context parallelism.
    messages = (Operation.SEND, Operation.RECEIVE)
    waits = {
        rank.rank: sum(
            call.wait_seconds
            for call in rank.calls
            if call.operation in messages and call.group != "cp"
        )
        for rank in (communication.ranks if communication else ())
    }
    ranks = []
    for rank in times.ranks:
        phases, calls = dict(rank.phase_seconds), dict(rank.communication_seconds)
        outside = waits.get(rank.rank, 0.0) - calls.get(Phase.PIPELINE, 0.0)
        outside = min(outside, calls.get(Phase.OTHER, 0.0), phases.get(Phase.OTHER, 0.0))
        for seconds in (phases, calls) if outside > 0 else ():
            seconds[Phase.OTHER] -= outside
            seconds[Phase.PIPELINE] = seconds.get(Phase.PIPELINE, 0.0) + outside
        ranks.append(replace(rank, phase_seconds=phases, communication_seconds=calls))
    return replace(times, ranks=tuple(ranks))


def scale_times(times: TimeRecord, factor: float) -> TimeRecord:
    """The same shares of an iteration that takes `factor` times as long."""
    ranks = []
    for rank in times.ranks:
        parts = (rank.phase_seconds, rank.communication_seconds)
        phases, calls = ({p: factor * seconds for p, seconds in part.items()} for part in parts)
        whole = factor * rank.iteration_seconds
        ranks.append(
            replace(
                rank, iteration_seconds=whole, phase_seconds=phases, communication_seconds=calls
            )
        )
    return replace(times, ranks=tuple(ranks))


def pass_seconds(rank: RankTime) -> float:
    """Seconds in forward and backward of an iteration, communication inside them included."""
    phases = rank.phase_seconds
    return phases.get(Phase.FORWARD, 0.0) + phases.get(Phase.BACKWARD, 0.0)


def idle_over_work(rank: RankTime) -> float:
    """Seconds that a stage waits for others over those in which it works."""
    return rank.phase_seconds.get(Phase.PIPELINE, 0.0) / pass_seconds(rank)


def pass_seconds_without_communication(rank: RankTime) -> float:
    """Seconds in forward and backward of an iteration without the communication inside them."""
    return sum(
        rank.phase_seconds.get(phase, 0.0) - rank.communication_seconds.get(phase, 0.0)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )


def mean(values: Iterable[float]) -> float:
    """Mean; 0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0
