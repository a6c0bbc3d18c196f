"""Comparison of a dry run with the closed forms: parameters, every call, and bytes by category."""

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

_UNCOUNTED_OPERATIONS = (Operation.RECEIVE, Operation.BARRIER)
_CallKind = tuple[str, str, int]


@dataclass(frozen=True)
class CallDifference:
    """Calls of one kind whose number differs between dry run and closed form."""

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
    """Counts of one rank from the dry run, and the planner's numbers for this rank.

    The planner computes its numbers by formulas, which are called closed forms.
    """

    report: RankReport
    pipeline_rank: int
    parameters: int
    """Parameters by the closed form, as all fields below."""
    wire_bytes: int
    in_flight: int
    memory: dict[str, tuple[int, int]]
    """Bytes by category: those of the dry run, and those of the closed form."""
    differences: tuple[CallDifference, ...]

    @property
    def agrees(self) -> bool:
        """True if parameters, every call and all bytes on the wire are equal."""
        has_equal_bytes = self.report.communication.wire_bytes == self.wire_bytes
        has_equal_parameters = self.parameters == self.report.parameters
        return has_equal_bytes and has_equal_parameters and not self.differences


def dry_run_ranks(
    runner: DryRunner, model: Model, spec: RunSpec, ranks: tuple[int, ...]
) -> list[CheckedRank]:
    """Dry-run the ranks of a run, and return the comparison of each rank with its closed forms.

    Raises:
        DryRunError: Megatron refused a rank or failed.
    """
    flags, world = encode_flags(model, spec), spec.parallelism.world_size
    reports = [runner.run(RankJob(flags, world, rank)) for rank in ranks]
    return [compare_rank(spec, report) for report in reports]


def compare_rank(spec: RunSpec, report: RankReport) -> CheckedRank:
    """Compare the bytes and calls of a rank's dry run with the planner's closed forms.

    The result has the numbers of both, and their differences in calls.
    """
    stage = spec.parallelism.pipeline_rank(report.rank)
    as_run = drop_transformer_engine(spec)
    calls = rank_collectives(as_run, stage)
    expected, counted = Counter[_CallKind](), Counter[_CallKind]()
    for call in calls:
        expected[call.group, call.operation, call.payload_bytes] += call.calls
    for row in report.communication.calls:
        if row.ranks > 1 and row.operation not in _UNCOUNTED_OPERATIONS and row.payload_bytes:
            counted[row.group, row.operation, row.payload_bytes] += row.calls
    return CheckedRank(
        report=report,
        pipeline_rank=stage,
        parameters=rank_parameters(as_run, stage).total,
        wire_bytes=total_wire_bytes(calls),
        in_flight=chunks_in_flight(as_run, stage),
        memory=_pair_memory(as_run, report, stage),
        differences=tuple(
            CallDifference(*key, dry_run=counted[key], closed_form=expected[key])
            for key in sorted(counted | expected)
            if counted[key] != expected[key]
        ),
    )


@dataclass(frozen=True)
class VerifiedStrategy:
    """A candidate with dry runs of its first and last rank, or with the reason why there are none."""

    candidate: Candidate
    comparisons: tuple[CheckedRank, ...]
    refusal: str = ""


def dry_run_plan(plan: Plan, count: int) -> list[VerifiedStrategy]:
    """Dry-run the first and the last rank of the `count` best candidates that can be dry-run.

    Better candidates that cannot be dry-run are in the list too, with the reason.
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


def _pair_memory(spec: RunSpec, report: RankReport, stage: int) -> dict[str, tuple[int, int]]:
    """Return pairs of bytes by category of memory: from the dry run, and from the closed form of the stage."""
    counted = report.memory.categories
    closed = estimate_rank_memory(spec, stage)
    short_lived = (MemoryCategory.LOGITS, MemoryCategory.TEMPORARY, MemoryCategory.COMMUNICATION)
    return {
        "weights": (counted[MemoryCategory.WEIGHTS], closed.weights),
        "gradients": (counted[MemoryCategory.GRADIENTS], closed.gradients),
        "optimizer": (
            counted[MemoryCategory.OPTIMIZER_STATE],
            closed.main_parameters + closed.optimizer_state,
        ),
        "activations": (counted[MemoryCategory.ACTIVATIONS], closed.activations),
        "logits and temporaries": (
            sum(counted[category] for category in short_lived),
            closed.temporaries + closed.communication,
        ),
        "peak": (report.memory.peak_bytes, closed.live),
    }
