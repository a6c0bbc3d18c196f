"""Split each rank's iteration by phase, from `time.json`, as the DeepSpeed report does.

Phases are Megatron's own timers on the host's clock. On a GPU a phase ends when its kernels are launched,
unless the timers synchronise, so on a GPU the fractions are those of the launching thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from parakit.artifacts.measurements import CommunicationRecord, RankTime, TimeRecord
from parakit.costs import Operation, Phase


@dataclass(frozen=True)
class TimeShares:
    """Fractions of one rank's steady iteration, by phase."""

    rank: int
    iteration_seconds: float
    phases: Mapping[Phase, float]
    """Fraction of the iteration per phase, communication inside the phase included; they sum to 1."""
    exposed_communication: float
    """Fraction of the iteration in communication calls and in waiting for them, over all phases."""

    @property
    def published_fractions(self) -> tuple[float, float, float]:
        """Fractions of forward, of backward with gradient sync, and of the optimizer. The three add up to 1.

        The DeepSpeed report publishes these three fractions.
        """
        forward = self.phases.get(Phase.FORWARD, 0.0)
        backward = self.phases.get(Phase.BACKWARD, 0.0) + self.phases.get(Phase.GRADIENT_SYNC, 0.0)
        optimizer = self.phases.get(Phase.OPTIMIZER, 0.0)
        total = forward + backward + optimizer or 1.0
        return forward / total, backward / total, optimizer / total


def compute_time_shares(record: TimeRecord) -> tuple[TimeShares, ...]:
    """Return the fractions by phase of every rank that had a steady iteration."""
    shares = []
    for rank in record.ranks:
        if rank.iteration_seconds > 0:
            # Phases have their own clock readings, so their sum differs from the iteration by microseconds.
            total = sum(rank.phase_seconds.values()) or rank.iteration_seconds
            phases = {phase: seconds / total for phase, seconds in rank.phase_seconds.items()}
            exposed = sum(rank.communication_seconds.values()) / total
            shares.append(TimeShares(rank.rank, rank.iteration_seconds, phases, exposed))
    return tuple(shares)


def add_pipeline_waits(times: TimeRecord, communication: CommunicationRecord | None) -> TimeRecord:
    """Return the times with all waits for neighbouring stages counted in the pipeline phase.

    The interleaved schedule waits for messages outside of Megatron's timers, so the record counts these waits in
    phase `other`. The communication log has the waits per call.
    """
    ranks = []
    waits = _message_wait_seconds(communication)
    for rank in times.ranks:
        phases, calls = dict(rank.phase_seconds), dict(rank.communication_seconds)
        outside = waits.get(rank.rank, 0.0) - calls.get(Phase.PIPELINE, 0.0)
        outside = min(outside, calls.get(Phase.OTHER, 0.0), phases.get(Phase.OTHER, 0.0))
        if outside > 0:
            for seconds in (phases, calls):
                seconds[Phase.OTHER] -= outside
                seconds[Phase.PIPELINE] = seconds.get(Phase.PIPELINE, 0.0) + outside
        ranks.append(replace(rank, phase_seconds=phases, communication_seconds=calls))
    return replace(times, ranks=tuple(ranks))


def _message_wait_seconds(communication: CommunicationRecord | None) -> dict[int, float]:
    """Return, by rank, the seconds of waiting for messages between pipeline stages; empty without a log."""
    waits = {}
    for rank in communication.ranks if communication else ():
        waits[rank.rank] = sum(
            call.wait_seconds
            for call in rank.calls
            # Point-to-point calls of the context-parallel group are the messages of its ring.
            if call.operation in (Operation.SEND, Operation.RECEIVE) and call.group != "cp"
        )
    return waits


def scale_times(times: TimeRecord, factor: float) -> TimeRecord:
    """Return the time record with all seconds multiplied by `factor`."""
    ranks = []
    for rank in times.ranks:
        phases = {phase: factor * seconds for phase, seconds in rank.phase_seconds.items()}
        calls = {phase: factor * seconds for phase, seconds in rank.communication_seconds.items()}
        ranks.append(
            replace(
                rank,
                iteration_seconds=factor * rank.iteration_seconds,
                phase_seconds=phases,
                communication_seconds=calls,
            )
        )
    return replace(times, ranks=tuple(ranks))


def pass_seconds(rank: RankTime) -> float:
    """Return a rank's seconds per iteration in forward and backward, communication inside included."""
    phases = rank.phase_seconds
    return phases.get(Phase.FORWARD, 0.0) + phases.get(Phase.BACKWARD, 0.0)


def idle_over_work(rank: RankTime) -> float:
    """Return the time that a rank waits for other stages over the time of its passes."""
    return rank.phase_seconds.get(Phase.PIPELINE, 0.0) / pass_seconds(rank)


def pass_seconds_without_communication(rank: RankTime) -> float:
    """Return a rank's seconds per iteration in forward and backward without communication inside."""
    return sum(
        rank.phase_seconds.get(phase, 0.0) - rank.communication_seconds.get(phase, 0.0)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )


def mean(values: Iterable[float]) -> float:
    """Return the mean of values; 0 if there are none."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
