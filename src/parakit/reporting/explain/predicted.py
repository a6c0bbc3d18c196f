"""Predicted beside measured, a rank, by component, with residuals.

Predictions are `parakit.planner`'s closed forms; measurements are the log and the run's ledgers. What is
missing on either side is listed in `notes`, never filled in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.measurements import RankCommunication, TimeRecord
from parakit.artifacts.run import COMMUNICATION_FILE, MEMORY_FILE, TIME_FILE
from parakit.config.groups import Group
from parakit.config.run import RunSpec
from parakit.config.strategy import Parallelism
from parakit.costs import (
    MegatronVersion,
    Operation,
    UnevenSplitError,
    rank_collectives,
    rank_parameters,
)
from parakit.formatting.units import ms
from parakit.logs import Run
from parakit.reporting.analyse.entry import Entry, entry_names
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.time_shares import (
    TimeShares,
    add_pipeline_waits,
    compute_time_shares,
    idle_over_work,
    mean,
    pass_seconds,
    scale_times,
)
from parakit.reporting.explain.closed_form import (
    ComponentResidual,
    NoClosedFormError,
    compare_memory,
    detect_kernels,
    detect_megatron_version,
    require_closed_form_spec,
)

_SILENT = (Operation.RECEIVE, Operation.BARRIER)
"""They send nothing; a receive is its sender's call."""

_ROUTED = (Group.EXPERT, Group.EXPERT_TENSOR)
"""How many tokens these calls move is the router's choice; the closed form has the mean."""


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
    configuration: RunSpec, rank: RankCommunication, megatron: MegatronVersion
) -> CallComparison:
    """Compare a rank's steady iteration with the closed form, call by call."""
    stage = configuration.parallelism.pipeline_rank(rank.rank)
    made, named = defaultdict(list), defaultdict(list)
    left: Counter[tuple[str, str, int]] = Counter()
    for call in rank.calls:
        if call.ranks > 1 and call.operation not in _SILENT:
            key = call.group, call.operation.value
            made[key].append(call)
            left[*key, 0 if call.group in _ROUTED else call.payload_bytes] += call.calls
    for item in rank_collectives(configuration, stage, megatron):
        key = item.group.value, item.operation.value
        named[key].append(item)
        left[*key, 0 if key[0] in _ROUTED else item.payload_bytes] -= item.calls
    rows = tuple(
        CallRow(
            *key,
            what="; ".join(dict.fromkeys(item.description for item in named[key])),
            measured_calls=sum(call.calls for call in made[key]),
            predicted_calls=sum(item.calls for item in named[key]),
            measured_wire_bytes=sum(call.wire_bytes for call in made[key]),
            predicted_wire_bytes=sum(item.wire_bytes for item in named[key]),
        )
        for key in sorted({*made, *named})
    )
    left_over = (Unattributed(*kind, calls) for kind, calls in sorted(left.items()) if calls)
    return CallComparison(rank.rank, rows, tuple(left_over))


@dataclass(frozen=True)
class PredictionEvidence:
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


def compare_run_with_predictions(run: Run, iteration_ms: float | None = None) -> PredictionEvidence:
    """Compare one run with its closed forms; whatever is missing becomes a note.

    How long an iteration takes is said once, by the report's row: the median of its window
    (`iteration_ms`). The ledger's means are of every steady iteration of one run, warm-up and pauses
    too, so of them only the shares are taken. Without the row's figure they stand for themselves.
    """
    kept = {
        COMMUNICATION_FILE: run.measurements.communication,
        MEMORY_FILE: run.measurements.memory,
    }
    notes = [f"no usable {name}" for name, record in kept.items() if record is None]
    times, problem = run.time_record
    if times is not None and run.device != "cpu":
        times, problem = None, _LAUNCHED
    scale = 1.0
    if times:
        times = add_pipeline_waits(times, run.measurements.communication)
        whole = mean(rank.iteration_seconds for rank in times.ranks)
        scale = iteration_ms / (1000 * whole) if iteration_ms else 1.0
        times = scale_times(times, scale)
    notes += filter(None, [problem])
    found = PredictionEvidence(times, scale, compute_time_shares(times) if times else ())
    try:
        return _predicted(run, require_closed_form_spec(run), replace(found, notes=tuple(notes)))
    except (NoClosedFormError, UnevenSplitError) as error:
        return replace(found, notes=(*notes, f"nothing predicted: {error}"))


def _predicted(run: Run, spec: RunSpec, found: PredictionEvidence) -> PredictionEvidence:
    """With what the closed forms say; a ledger of another run's ranks must not break the report."""
    split, parameters = spec.parallelism, []
    for count in run.log.parameters:
        # Megatron's own count of every model-parallel rank; its first data-parallel rank stands for all.
        if count.pipeline_rank < split.pipeline and count.tensor_rank < split.tensor:
            predicted = rank_parameters(spec, count.pipeline_rank).total
            rank = count.pipeline_rank * (split.world_size // split.pipeline) + count.tensor_rank
            own = ComponentResidual(rank, "parameters", count.parameters, predicted)
            parameters.append(own)
    sent, held, ranks = (
        run.measurements.communication,
        run.measurements.memory,
        range(split.world_size),
    )
    callers = [r for r in (sent.ranks if sent else ()) if r.rank in ranks and r.steady_iterations]
    holders = [rank for rank in (held.ranks if held else ()) if rank.rank in ranks]
    kernels, megatron = detect_kernels(run), detect_megatron_version(run)
    return replace(
        found,
        parameters=tuple(parameters),
        calls=tuple(compare_calls(spec, rank, megatron) for rank in callers),
        memory=tuple(one for rank in holders for one in compare_memory(spec, rank, kernels)),
        bubble=compare_bubble(spec, found.times) if found.times else (),
        configuration=spec,
    )


_LAUNCHED = (
    f"{TIME_FILE} is of the host's clock, which on a GPU says when kernels were launched and "
    "not when they ran, so nothing is concluded from it"
)


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


def measure_stages(configuration: RunSpec, times: TimeRecord) -> StageTimes | None:
    """Working seconds of every stage, the mean of its ranks; None if a stage has no ledger."""
    stages = range(configuration.parallelism.pipeline)
    by_stage: list[list[float]] = [[] for _ in stages]
    for rank in times.ranks:
        stage = configuration.parallelism.pipeline_rank(rank.rank)
        if stage in stages and rank.iteration_seconds:
            by_stage[stage].append(pass_seconds(rank) / configuration.microbatches)
    if not all(by_stage):
        return None
    virtual = configuration.parallelism.virtual_stages
    return StageTimes(tuple(map(mean, by_stage)), configuration.microbatches, virtual)


def compare_bubble(configuration: RunSpec, times: TimeRecord) -> tuple[ComponentResidual, ...]:
    """Idle over working time of every rank of a pipeline; nothing without one."""
    if configuration.parallelism.pipeline == 1:
        return ()
    stages, ideal = measure_stages(configuration, times), ideal_bubble(configuration)
    each = " and ".join(f"{ms(value)} ms" for value in stages.seconds) if stages else ""
    found = []
    for rank in times.ranks:
        if pass_seconds(rank) > 0:
            note = "another stage has no time ledger"
            if stages:
                idle = stages.idle_over_work(configuration.parallelism.pipeline_rank(rank.rank))
                note = f"stages work {each} a micro batch, which makes {idle:.1%}"
            measured = idle_over_work(rank)
            found.append(ComponentResidual(rank.rank, "idle over work", measured, ideal, note))
    return tuple(found)


@dataclass(frozen=True)
class Subject:
    """One configuration of a report, its newest run explained."""

    entry: Entry
    evidence: PredictionEvidence
    label: str
    """How tables and sentences call it; with its model where a report has several."""

    @property
    def run(self) -> Run:
        """The run whose ledgers are read."""
        return self.entry.run

    @property
    def split(self) -> Parallelism:
        """How it was split; whole where that is not known."""
        return self.run.spec.parallelism if self.run.spec else Parallelism()

    @property
    def cohort(self) -> tuple[object, ...]:
        """Subjects that may be compared: model, device, backend and precision."""
        run, spec = self.run, self.run.spec
        return run.model, run.device, spec and spec.backend, spec and spec.dtype


def build_subjects(report: Report) -> tuple[Subject, ...]:
    """Every entry with its evidence."""
    each = zip(report.entries, entry_names(report.entries), strict=True)
    return tuple(
        Subject(one, compare_run_with_predictions(one.run, one.time_ms), name) for one, name in each
    )


def find_subject(
    subjects: Sequence[Subject], like: Subject, split: Parallelism, *, same_batch: bool = False
) -> Subject | None:
    """The subject that is split so in the cohort of another, and of its batch if asked."""
    batch = like.run.spec and like.run.spec.batch
    alike = (o for o in subjects if o.split == split and o.cohort == like.cohort)
    mine = (o for o in alike if not same_batch or (o.run.spec and o.run.spec.batch) == batch)
    return next(mine, None)
