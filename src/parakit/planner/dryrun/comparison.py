"""A dry run beside the closed forms: parameters, every call, and bytes by category."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from parakit.artifacts.dry_run import RankJob, RankReport
from parakit.artifacts.measurements import MemoryCategory
from parakit.config.model import Model
from parakit.config.run import RunSpec
from parakit.costs import (
    Operation,
    chunks_in_flight,
    estimate_rank_memory,
    rank_collectives,
    rank_parameters,
    total_wire_bytes,
)
from parakit.planner.dryrun.job import (
    DryRunError,
    DryRunner,
    drop_transformer_engine,
    encode_flags,
    parse_ranks,
    refuse_unsupported,
)
from parakit.planner.search import Candidate, Plan

_SILENT = (Operation.RECEIVE, Operation.BARRIER)
_Key = tuple[str, str, int]


@dataclass(frozen=True)
class CallDifference:
    """Calls of one kind whose number differs."""

    group: str
    operation: str
    payload_bytes: int
    dry_run: int
    closed_form: int

    def __str__(self) -> str:
        return (
            f"{self.group} {self.operation} of {self.payload_bytes} bytes: {self.dry_run} calls in "
            f"the dry run, {self.closed_form} in the closed form"
        )


@dataclass(frozen=True)
class CheckedRank:
    """One rank, counted and calculated."""

    report: RankReport
    pipeline_rank: int
    parameters: int
    """Of the closed form, as is all that follows."""
    wire_bytes: int
    in_flight: int
    memory: dict[str, tuple[int, int]]
    """Bytes by what they are for: the dry run's, the closed form's."""
    differences: tuple[CallDifference, ...]

    @property
    def agrees(self) -> bool:
        """Whether parameters, every call and all bytes on the wire are equal."""
        same = self.report.communication.wire_bytes == self.wire_bytes
        return same and self.parameters == self.report.parameters and not self.differences


def dry_run_ranks(
    runner: DryRunner, model: Model, spec: RunSpec, ranks: tuple[int, ...]
) -> list[CheckedRank]:
    """Every rank's dry run beside its closed forms; raises as `DryRunner.run`."""
    flags, world = encode_flags(model, spec), spec.parallelism.world_size
    reports = [runner.run(RankJob(flags, world, rank)) for rank in ranks]
    return [compare_rank(spec, report) for report in reports]


def compare_rank(spec: RunSpec, report: RankReport) -> CheckedRank:
    """Put the closed forms beside a rank's dry run."""
    stage = spec.parallelism.pipeline_rank(report.rank)
    as_run = drop_transformer_engine(spec)
    calls = rank_collectives(as_run, stage)
    expected, found = Counter[_Key](), Counter[_Key]()
    for call in calls:
        expected[call.group, call.operation, call.payload_bytes] += call.calls
    for row in report.communication.calls:
        if row.ranks > 1 and row.operation not in _SILENT and row.payload_bytes:
            found[row.group, row.operation, row.payload_bytes] += row.calls
    return CheckedRank(
        report=report,
        pipeline_rank=stage,
        parameters=rank_parameters(as_run, stage).total,
        wire_bytes=total_wire_bytes(calls),
        in_flight=chunks_in_flight(as_run, stage),
        memory=_memory(as_run, report, stage),
        differences=tuple(
            CallDifference(*key, dry_run=found[key], closed_form=expected[key])
            for key in sorted(found | expected)
            if found[key] != expected[key]
        ),
    )


@dataclass(frozen=True)
class VerifiedStrategy:
    """A candidate and its first and last rank's dry runs, or why there are none."""

    candidate: Candidate
    comparisons: tuple[CheckedRank, ...]
    refusal: str = ""


def dry_run_plan(plan: Plan, count: int) -> list[VerifiedStrategy]:
    """Dry-run the first and last rank of the `count` best candidates that a dry run can show.

    Those passed over are in the list with their refusal.
    """
    verified: list[VerifiedStrategy] = []
    with DryRunner() as runner:
        for candidate in plan.ranked:
            if sum(not item.refusal for item in verified) == count:
                break
            spec = candidate.spec
            try:
                refuse_unsupported(spec)
                ranks = parse_ranks("first,last", spec)
                compared = dry_run_ranks(runner, plan.request.model, spec, ranks)
                verified.append(VerifiedStrategy(candidate, tuple(compared)))
            except DryRunError as error:
                verified.append(VerifiedStrategy(candidate, (), str(error)))
    return verified


def _memory(spec: RunSpec, report: RankReport, stage: int) -> dict[str, tuple[int, int]]:
    held = report.memory.categories
    closed = estimate_rank_memory(spec, stage)
    short_lived = (MemoryCategory.LOGITS, MemoryCategory.TEMPORARY, MemoryCategory.COMMUNICATION)
    return {
        "weights": (held[MemoryCategory.WEIGHTS], closed.weights),
        "gradients": (held[MemoryCategory.GRADIENTS], closed.gradients),
        "optimizer": (
            held[MemoryCategory.OPTIMIZER_STATE],
            closed.main_parameters + closed.optimizer_state,
        ),
        "activations": (held[MemoryCategory.ACTIVATIONS], closed.activations),
        "logits and temporaries": (
            sum(held[category] for category in short_lived),
            closed.temporaries + closed.communication,
        ),
        "peak": (report.memory.peak_bytes, closed.live),
    }
