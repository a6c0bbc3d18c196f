"""The pipeline's idle time: (p−1)/m beside what the time ledger measured, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.records.measurements import Phase, TimeRecord
from tools.report.explain.closed_form import pipeline_rank
from tools.report.explain.residual import Compared
from tools.report.explain.time_shares import busy_seconds, mean
from tools.spec.run import RunSpec


@dataclass(frozen=True)
class Stages:
    """Seconds that each pipeline stage works on one micro batch, measured, and the split."""

    seconds: tuple[float, ...]
    microbatches: int
    virtual: int

    def iteration_seconds(self, microbatches: int) -> float:
        """1F1B over these stages: m·max(T) + (ΣT − max T)/v (arXiv:2104.04473 §2.2)."""
        slowest = max(self.seconds)
        return microbatches * slowest + (sum(self.seconds) - slowest) / self.virtual

    def idle_over_work(self, stage: int) -> float:
        """Idle over working time of a stage if messages take none."""
        work = self.microbatches * self.seconds[stage]
        return (self.iteration_seconds(self.microbatches) - work) / work if work else 0.0


def ideal_bubble(configuration: RunSpec, microbatches: int | None = None) -> float:
    """(p−1)/(m·v): idle over working time with equal stages."""
    split = configuration.parallelism
    count = microbatches or configuration.microbatches
    return (split.pipeline - 1) / (count * split.virtual_stages)


def measured_stages(configuration: RunSpec, times: TimeRecord) -> Stages | None:
    """Working seconds of every stage, the mean of its ranks; None if a stage has no ledger."""
    stages = range(configuration.parallelism.pipeline)
    by_stage: list[list[float]] = [[] for _ in stages]
    for rank in times.ranks:
        stage = pipeline_rank(configuration, rank.rank)
        if stage in stages and rank.iteration_seconds:
            by_stage[stage].append(busy_seconds(rank) / configuration.microbatches)
    if not all(by_stage):
        return None
    virtual = configuration.parallelism.virtual_stages
    return Stages(tuple(map(mean, by_stage)), configuration.microbatches, virtual)


def compare_bubble(configuration: RunSpec, times: TimeRecord) -> tuple[Compared, ...]:
    """Idle over working time of every rank of a pipeline; nothing without one."""
    if configuration.parallelism.pipeline == 1:
        return ()
    stages = measured_stages(configuration, times)
    ranks = [rank for rank in times.ranks if busy_seconds(rank) > 0]
    return tuple(
        Compared(
            rank.rank,
            "idle over work",
            rank.phase_seconds.get(Phase.PIPELINE, 0.0) / busy_seconds(rank),
            ideal_bubble(configuration),
            _note(configuration, stages, rank.rank),
        )
        for rank in ranks
    )


def _note(configuration: RunSpec, stages: Stages | None, rank: int) -> str:
    if stages is None:
        return "another stage has no time ledger"
    stage = pipeline_rank(configuration, rank)
    each = _milliseconds(stages.seconds)
    return f"stages work {each} a micro batch, which makes {stages.idle_over_work(stage):.1%}"


def _milliseconds(seconds: Sequence[float]) -> str:
    return " and ".join(f"{1000 * value:.1f} ms" for value in seconds)
