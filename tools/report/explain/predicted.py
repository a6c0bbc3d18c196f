"""Predicted beside measured, a rank, by component, with residuals.

Predictions are `tools.plan`'s closed forms; measurements are the log and the run's ledgers. What is
missing on either side is listed in `notes`, never filled in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.plan.collectives.call import CollectiveCall, Megatron
from tools.plan.collectives.rank import communication_of_rank
from tools.plan.tensors import UnevenSplitError, rank_parameters
from tools.records.measurements import Calls, Operation, RankCommunication, TimeRecord
from tools.records.run import COMMUNICATION_FILE, MEMORY_FILE, TIME_FILE
from tools.report.analyse.time_shares import (
    TimeShares,
    busy_seconds,
    idle_over_work,
    mean,
    scaled,
    time_shares,
    with_pipeline_waits,
)
from tools.report.explain.closed_form import (
    ComponentResidual,
    NoClosedFormError,
    compare_memory,
    configuration_of_run,
    kernels_of_run,
    known_ranks,
    megatron_of_run,
)
from tools.report.read.runs import Run
from tools.spec.groups import Group
from tools.spec.run import RunSpec
from tools.text.units import ms

_SILENT = (Operation.RECEIVE, Operation.BARRIER)
"""They send nothing; a receive is its sender's call."""

_ROUTED = (Group.EXPERT.value, Group.EXPERT_TENSOR.value)
"""How many tokens these calls move is the router's choice; the closed form has the mean."""

CallKind = tuple[str, str, int]
"""Group, operation, payload bytes; payload is 0 where it depends on the router."""


@dataclass(frozen=True)
class CallRow:
    """All calls of one group and operation in an iteration."""

    group: str
    operation: str
    what: str
    """What is moved, by the closed form; empty if it has no such call."""
    measured_calls: int
    predicted_calls: int
    measured_wire_bytes: int
    predicted_wire_bytes: int

    @property
    def residual_wire_bytes(self) -> int:
        """Measured minus predicted."""
        return self.measured_wire_bytes - self.predicted_wire_bytes


@dataclass(frozen=True)
class Unattributed:
    """Calls on one side only."""

    group: str
    operation: str
    payload_bytes: int
    calls: int
    """Positive: made, and in no closed form. Negative: predicted, and not made."""


@dataclass(frozen=True)
class CallComparison:
    """One rank."""

    rank: int
    rows: tuple[CallRow, ...]
    unattributed: tuple[Unattributed, ...]

    @property
    def measured_wire_bytes(self) -> int:
        """Sent in an iteration."""
        return sum(row.measured_wire_bytes for row in self.rows)

    @property
    def predicted_wire_bytes(self) -> int:
        """Sent in an iteration, in closed form."""
        return sum(row.predicted_wire_bytes for row in self.rows)


def compare_calls(
    configuration: RunSpec, rank: RankCommunication, megatron: Megatron
) -> CallComparison:
    """Compare a rank's steady iteration with the closed form, call by call."""
    stage = configuration.parallelism.pipeline_rank(rank.rank)
    predicted = communication_of_rank(configuration, stage, megatron)
    measured = [c for c in rank.calls if c.ranks > 1 and c.operation not in _SILENT]
    return CallComparison(
        rank.rank, tuple(_rows(measured, predicted)), tuple(_left_over(measured, predicted))
    )


def _rows(measured: Iterable[Calls], predicted: Iterable[CollectiveCall]) -> list[CallRow]:
    made, named = defaultdict(list), defaultdict(list)
    for call in measured:
        made[call.group, call.operation.value].append(call)
    for item in predicted:
        named[item.group.value, item.operation.value].append(item)
    return [
        CallRow(
            group=group,
            operation=operation,
            what="; ".join(dict.fromkeys(i.what for i in named[group, operation])),
            measured_calls=sum(call.calls for call in made[group, operation]),
            predicted_calls=sum(item.calls for item in named[group, operation]),
            measured_wire_bytes=sum(call.wire_bytes for call in made[group, operation]),
            predicted_wire_bytes=sum(item.wire_bytes for item in named[group, operation]),
        )
        for group, operation in sorted({*made, *named})
    ]


def _left_over(
    measured: Iterable[Calls], predicted: Iterable[CollectiveCall]
) -> list[Unattributed]:
    found: Counter[CallKind] = Counter()
    for call in measured:
        found[_kind(call.group, call.operation.value, call.payload_bytes)] += call.calls
    for item in predicted:
        found[_kind(item.group.value, item.operation.value, item.payload_bytes)] -= item.calls
    return [Unattributed(*kind, calls) for kind, calls in sorted(found.items()) if calls]


def _kind(group: str, operation: str, payload_bytes: int) -> CallKind:
    return group, operation, 0 if group in _ROUTED else payload_bytes


@dataclass(frozen=True)
class Evidence:
    """What the ledgers of one run measured, and what the closed forms predict."""

    times: TimeRecord | None = None
    """Of an iteration that takes as long as the report's row says: see `findings_of`."""
    scale: float = 1.0
    """The row's time an iteration over the ledger's mean; the ledger's other seconds take it too."""
    shares: tuple[TimeShares, ...] = ()
    parameters: tuple[ComponentResidual, ...] = ()
    calls: tuple[CallComparison, ...] = ()
    memory: tuple[ComponentResidual, ...] = ()
    bubble: tuple[ComponentResidual, ...] = ()
    configuration: RunSpec | None = None
    """None where no closed form applies; `notes` says why."""
    notes: tuple[str, ...] = ()


def evidence_of(run: Run, iteration_ms: float | None = None) -> Evidence:
    """Compare one run with its closed forms; whatever is missing becomes a note.

    How long an iteration takes is said once, by the report's row: the median of its window
    (`iteration_ms`). The ledger's means are of every steady iteration of one run, warm-up and pauses
    too, so of them only the shares are taken. Without the row's figure they stand for themselves.
    """
    times, problem = _times(run)
    scale = 1.0
    if times:
        times = with_pipeline_waits(times, run.ledgers.communication)
        whole = mean(rank.iteration_seconds for rank in times.ranks)
        scale = iteration_ms / (1000 * whole) if iteration_ms else 1.0
        times = scaled(times, scale)
    notes = [*_missing(run), *([problem] if problem else [])]
    shares = time_shares(times) if times else ()
    try:
        configuration = configuration_of_run(run)
        return Evidence(
            times=times,
            scale=scale,
            shares=shares,
            parameters=tuple(_parameters(run, configuration)),
            calls=tuple(_calls(run, configuration)),
            memory=tuple(_memory(run, configuration)),
            bubble=compare_bubble(configuration, times) if times else (),
            configuration=configuration,
            notes=tuple(notes),
        )
    except (NoClosedFormError, UnevenSplitError) as error:
        return Evidence(times, scale, shares, notes=(*notes, f"nothing predicted: {error}"))


def _times(run: Run) -> tuple[TimeRecord | None, str]:
    times, problem = run.time_ledger
    if times is not None and run.device != "cpu":
        return None, (
            f"{TIME_FILE} is of the host's clock, which on a GPU says when kernels were launched and "
            "not when they ran, so nothing is concluded from it"
        )
    return times, problem


def _missing(run: Run) -> Iterator[str]:
    if run.ledgers.communication is None:
        yield f"no usable {COMMUNICATION_FILE}"
    if run.ledgers.memory is None:
        yield f"no usable {MEMORY_FILE}"


def _parameters(run: Run, configuration: RunSpec) -> Iterator[ComponentResidual]:
    """Megatron's own count of every model-parallel rank; its first data-parallel rank stands for all."""
    split = configuration.parallelism
    for count in run.log.parameters:
        if count.pipeline_rank >= split.pipeline or count.tensor_rank >= split.tensor:
            continue
        predicted = rank_parameters(configuration, count.pipeline_rank).total
        ranks_a_stage = split.world_size // split.pipeline
        rank = count.pipeline_rank * ranks_a_stage + count.tensor_rank
        yield ComponentResidual(rank, "parameters", count.parameters, predicted)


def _calls(run: Run, configuration: RunSpec) -> Iterator[CallComparison]:
    record = run.ledgers.communication
    if record is None:
        return
    wanted = known_ranks(configuration, tuple(rank.rank for rank in record.ranks))
    for rank in record.ranks:
        if rank.rank in wanted and rank.steady_iterations:
            yield compare_calls(configuration, rank, megatron_of_run(run))


def _memory(run: Run, configuration: RunSpec) -> Iterator[ComponentResidual]:
    record = run.ledgers.memory
    if record is None:
        return
    wanted = known_ranks(configuration, tuple(rank.rank for rank in record.ranks))
    for rank in record.ranks:
        if rank.rank in wanted:
            yield from compare_memory(configuration, rank, kernels_of_run(run))


@dataclass(frozen=True)
class StageTimes:
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
    """(p−1)/(m·v): idle over working time with equal stages; none where the pipeline stays full."""
    split = configuration.parallelism
    if split.schedule.is_asynchronous:
        return 0.0
    count = microbatches or configuration.microbatches
    return (split.pipeline - 1) / (count * split.virtual_stages)


def measured_stages(configuration: RunSpec, times: TimeRecord) -> StageTimes | None:
    """Working seconds of every stage, the mean of its ranks; None if a stage has no ledger."""
    stages = range(configuration.parallelism.pipeline)
    by_stage: list[list[float]] = [[] for _ in stages]
    for rank in times.ranks:
        stage = configuration.parallelism.pipeline_rank(rank.rank)
        if stage in stages and rank.iteration_seconds:
            by_stage[stage].append(busy_seconds(rank) / configuration.microbatches)
    if not all(by_stage):
        return None
    virtual = configuration.parallelism.virtual_stages
    return StageTimes(tuple(map(mean, by_stage)), configuration.microbatches, virtual)


def compare_bubble(configuration: RunSpec, times: TimeRecord) -> tuple[ComponentResidual, ...]:
    """Idle over working time of every rank of a pipeline; nothing without one."""
    if configuration.parallelism.pipeline == 1:
        return ()
    stages = measured_stages(configuration, times)
    ranks = [rank for rank in times.ranks if busy_seconds(rank) > 0]
    return tuple(
        ComponentResidual(
            rank.rank,
            "idle over work",
            idle_over_work(rank),
            ideal_bubble(configuration),
            _bubble_note(configuration, stages, rank.rank),
        )
        for rank in ranks
    )


def _bubble_note(configuration: RunSpec, stages: StageTimes | None, rank: int) -> str:
    if stages is None:
        return "another stage has no time ledger"
    stage = configuration.parallelism.pipeline_rank(rank)
    each = " and ".join(f"{ms(value)} ms" for value in stages.seconds)
    return f"stages work {each} a micro batch, which makes {stages.idle_over_work(stage):.1%}"
