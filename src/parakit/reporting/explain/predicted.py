"""Compare each run with the planner's closed forms: parameters, calls, memory and pipeline bubble.

Predictions are closed forms of `parakit.costs`. Measurements come from the log and from the run's
`comm.json`, `memory.json` and `time.json`. The result is a `PredictionEvidence` per run. A quantity that is
unknown on either side becomes a note and no value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
"""Operations that send nothing; a receive is counted as its sender's call."""

_ROUTED = (Group.EXPERT, Group.EXPERT_TENSOR)
"""Groups whose calls move as many tokens as the router chose; the closed form has the average."""
_UNKNOWN_SIZE = 0
"""Payload that stands for the varying payloads of calls in routed groups, so that they can match."""

_HOST_CLOCK = (
    f"{TIME_FILE} is of the host's clock, which on a GPU tells when kernels were launched and "
    "not when they ran, so nothing is concluded from it"
)


@dataclass(frozen=True)
class CallRow:
    """All calls of one operation in one process group, measured and predicted, in one iteration of a rank."""

    group: str
    operation: str
    what: str
    """Data that the calls move, by the closed form; empty if the closed form has no such call."""
    measured_calls: int
    predicted_calls: int
    measured_wire_bytes: int
    predicted_wire_bytes: int

    @property
    def residual_wire_bytes(self) -> int:
        """Measured minus predicted bytes on the wire."""
        return self.measured_wire_bytes - self.predicted_wire_bytes


@dataclass(frozen=True)
class Unattributed:
    """Calls of one group, operation and payload that were measured and not predicted, or the other way round."""

    group: str
    operation: str
    payload_bytes: int
    calls: int
    """Number of calls: positive if only the run made them, negative if they are only predicted."""


@dataclass(frozen=True)
class CallComparison:
    """Measured and predicted communication calls of one rank."""

    rank: int
    rows: tuple[CallRow, ...]
    unattributed: tuple[Unattributed, ...]

    @property
    def measured_wire_bytes(self) -> int:
        """Bytes that the rank sends per iteration, measured."""
        return sum(row.measured_wire_bytes for row in self.rows)

    @property
    def predicted_wire_bytes(self) -> int:
        """Bytes that the rank sends per iteration, by the closed form."""
        return sum(row.predicted_wire_bytes for row in self.rows)


def compare_calls(
    configuration: RunSpec, rank: RankCommunication, megatron: MegatronVersion
) -> CallComparison:
    """Compare the calls of a rank in a steady iteration with the predicted calls, by group and operation.

    Calls in groups of one rank, and operations that move no data, are left out.
    """
    stage = configuration.parallelism.pipeline_rank(rank.rank)
    measured_by_kind, predicted_by_kind = defaultdict(list), defaultdict(list)
    for call in rank.calls:
        if call.ranks > 1 and call.operation not in _SILENT:
            measured_by_kind[call.group, call.operation.value].append(call)
    for prediction in rank_collectives(configuration, stage, megatron):
        kind = prediction.group.value, prediction.operation.value
        predicted_by_kind[kind].append(prediction)
    rows: list[CallRow] = []
    unattributed: list[Unattributed] = []
    for group, operation in sorted({*measured_by_kind, *predicted_by_kind}):
        measured = measured_by_kind[group, operation]
        predicted = predicted_by_kind[group, operation]
        descriptions = dict.fromkeys(call.description for call in predicted)
        row = CallRow(
            group,
            operation,
            what="; ".join(descriptions),
            measured_calls=sum(call.calls for call in measured),
            predicted_calls=sum(call.calls for call in predicted),
            measured_wire_bytes=sum(call.wire_bytes for call in measured),
            predicted_wire_bytes=sum(call.wire_bytes for call in predicted),
        )
        rows.append(row)
        # Each measured call counts +1 and each predicted call -1, so that calls on both sides cancel.
        surplus_by_payload: Counter[int] = Counter()
        for call in measured:
            surplus_by_payload[_matched_payload(group, call.payload_bytes)] += call.calls
        for prediction in predicted:
            payload = _matched_payload(group, prediction.payload_bytes)
            surplus_by_payload[payload] -= prediction.calls
        for payload, surplus in sorted(surplus_by_payload.items()):
            if surplus:
                unattributed.append(Unattributed(group, operation, payload, surplus))
    return CallComparison(rank.rank, tuple(rows), tuple(unattributed))


def _matched_payload(group: str, payload_bytes: int) -> int:
    """Return the payload by which a call is matched with predictions; `_UNKNOWN_SIZE` in groups of routed tokens."""
    return _UNKNOWN_SIZE if group in _ROUTED else payload_bytes


@dataclass(frozen=True)
class PredictionEvidence:
    """Measurements of one run, and the formulas' predictions of the same quantities."""

    times: TimeRecord | None = None
    """Time record, scaled to the time per iteration of the report's row; None if it is not usable."""
    scale: float = 1.0
    """Row's time per iteration over the time record's mean; other measured seconds are scaled by it too."""
    shares: tuple[TimeShares, ...] = ()
    """Fractions of each rank's iteration per phase."""
    parameters: tuple[ComponentResidual, ...] = ()
    calls: tuple[CallComparison, ...] = ()
    memory: tuple[ComponentResidual, ...] = ()
    bubble: tuple[ComponentResidual, ...] = ()
    configuration: RunSpec | None = None
    """Configuration of the closed forms; None if none applies, and then `notes` has the reason."""
    notes: tuple[str, ...] = ()


def compare_run_with_predictions(run: Run, iteration_ms: float | None = None) -> PredictionEvidence:
    """Compare the measurements of a run with the formulas; each missing quantity becomes a note in the result.

    Args:
        run: The run with its measurements.
        iteration_ms: Milliseconds per iteration in the report's row, to which the time record is scaled. The mean of
            the record includes warm-up and pauses, and this median does not. None keeps the record's own times.
    """
    records = {
        COMMUNICATION_FILE: run.measurements.communication,
        MEMORY_FILE: run.measurements.memory,
    }
    notes = [f"no usable {name}" for name, record in records.items() if record is None]
    times, problem = run.time_record
    if times is not None and run.device != "cpu":
        times, problem = None, _HOST_CLOCK
    if problem:
        notes.append(problem)
    scale = 1.0
    if times:
        times = add_pipeline_waits(times, run.measurements.communication)
        if iteration_ms:
            recorded_seconds = mean(rank.iteration_seconds for rank in times.ranks)
            scale = iteration_ms / (1000 * recorded_seconds)
        times = scale_times(times, scale)
    evidence = PredictionEvidence(
        times, scale, compute_time_shares(times) if times else (), notes=tuple(notes)
    )
    try:
        return _add_predictions(evidence, run, require_closed_form_spec(run))
    except (NoClosedFormError, UnevenSplitError) as error:
        return replace(evidence, notes=(*notes, f"nothing predicted: {error}"))


def _add_predictions(evidence: PredictionEvidence, run: Run, spec: RunSpec) -> PredictionEvidence:
    """Return the evidence with the predictions of the formulas added.

    Ranks outside of the run's world size are skipped, because their records may be from another run.
    """
    ranks = range(spec.parallelism.world_size)
    calls: list[CallComparison] = []
    communication = run.measurements.communication
    if communication is not None:
        megatron = detect_megatron_version(run)
        for rank_calls in communication.ranks:
            if rank_calls.rank in ranks and rank_calls.steady_iterations:
                calls.append(compare_calls(spec, rank_calls, megatron))
    components: list[ComponentResidual] = []
    memory = run.measurements.memory
    if memory is not None:
        kernels = detect_kernels(run)
        for rank_memory in memory.ranks:
            if rank_memory.rank in ranks:
                components += compare_memory(spec, rank_memory, kernels)
    return replace(
        evidence,
        parameters=tuple(_compare_parameters(run, spec)),
        calls=tuple(calls),
        memory=tuple(components),
        bubble=compare_bubble(spec, evidence.times) if evidence.times else (),
        configuration=spec,
    )


def _compare_parameters(run: Run, spec: RunSpec) -> Iterator[ComponentResidual]:
    """Yield the number of parameters that Megatron printed and the predicted number, per model-parallel rank.

    Megatron prints one number per pipeline and tensor rank. Each result has the number of the first data-parallel
    rank.
    """
    split = spec.parallelism
    for count in run.log.parameters:
        if count.pipeline_rank < split.pipeline and count.tensor_rank < split.tensor:
            predicted = rank_parameters(spec, count.pipeline_rank).total
            rank = count.pipeline_rank * (split.world_size // split.pipeline) + count.tensor_rank
            yield ComponentResidual(rank, "parameters", count.parameters, predicted)


@dataclass(frozen=True)
class StageTimes:
    """Measured seconds per micro batch of each pipeline stage, and the schedule's micro batches and virtual stages."""

    seconds: tuple[float, ...]
    microbatches: int
    virtual: int
    """Virtual stages per rank."""

    def iteration_seconds(self, microbatches: int) -> float:
        """Return the seconds of 1F1B over these stages: m·max(T) + (ΣT − max T)/v.

        The formula is of arXiv:2104.04473 §2.2; messages take no time in it.
        """
        slowest = max(self.seconds)
        return microbatches * slowest + (sum(self.seconds) - slowest) / self.virtual

    def idle_over_work(self, stage: int) -> float:
        """Return a stage's idle time over its working time if messages take no time."""
        work = self.microbatches * self.seconds[stage]
        return (self.iteration_seconds(self.microbatches) - work) / work if work else 0.0


def ideal_bubble(configuration: RunSpec, microbatches: int | None = None) -> float:
    """Return the bubble of a pipeline with equal stages, (p−1)/(m·v): idle time divided by working time.

    The result is 0 for asynchronous schedules, which keep the pipeline full.

    Args:
        configuration: The run's configuration.
        microbatches: Micro batches per iteration; None takes the configuration's.
    """
    split = configuration.parallelism
    if split.schedule.is_asynchronous:
        return 0.0
    count = microbatches or configuration.microbatches
    return (split.pipeline - 1) / (count * split.virtual_stages)


def measure_stages(configuration: RunSpec, times: TimeRecord) -> StageTimes | None:
    """Return the working seconds per micro batch of each stage, averaged over the ranks of the stage.

    None means that a stage has no rank with recorded times.
    """
    stages = range(configuration.parallelism.pipeline)
    seconds_by_stage: list[list[float]] = [[] for _ in stages]
    for rank in times.ranks:
        stage = configuration.parallelism.pipeline_rank(rank.rank)
        if stage in stages and rank.iteration_seconds:
            seconds_by_stage[stage].append(pass_seconds(rank) / configuration.microbatches)
    if not all(seconds_by_stage):
        return None
    virtual = configuration.parallelism.virtual_stages
    return StageTimes(tuple(map(mean, seconds_by_stage)), configuration.microbatches, virtual)


def compare_bubble(configuration: RunSpec, times: TimeRecord) -> tuple[ComponentResidual, ...]:
    """Return each rank's idle time divided by its working time: as measured, and as predicted for equal stages.

    The result is empty without a pipeline. The note of a rank has the idle time of 1F1B with the measured stage
    times.
    """
    if configuration.parallelism.pipeline == 1:
        return ()
    stages, ideal = measure_stages(configuration, times), ideal_bubble(configuration)
    residuals = []
    for rank in times.ranks:
        if pass_seconds(rank) > 0:
            note = "another stage left no time.json"
            if stages:
                work = " and ".join(f"{ms(seconds)} ms" for seconds in stages.seconds)
                idle = stages.idle_over_work(configuration.parallelism.pipeline_rank(rank.rank))
                note = f"stages work {work} per micro batch, which makes {idle:.1%}"
            measured = idle_over_work(rank)
            residuals.append(ComponentResidual(rank.rank, "idle over work", measured, ideal, note))
    return tuple(residuals)


@dataclass(frozen=True)
class Subject:
    """Row of a report that is explained, with the measurements of its newest run."""

    entry: Entry
    evidence: PredictionEvidence
    label: str
    """Name of the row in tables and sentences; it includes the model if the report has several."""

    @property
    def run(self) -> Run:
        """Newest run of the row, whose measurements are read."""
        return self.entry.run

    @property
    def split(self) -> Parallelism:
        """Parallelism of the run; that of a single rank if it is unknown."""
        return self.run.spec.parallelism if self.run.spec else Parallelism()

    @property
    def cohort(self) -> tuple[object, ...]:
        """Model, device, backend and precision: rows may be compared if these are equal."""
        run, spec = self.run, self.run.spec
        return run.model, run.device, spec and spec.backend, spec and spec.dtype


def build_subjects(report: Report) -> tuple[Subject, ...]:
    """Return every row of a report with the comparison of its newest run with the closed forms."""
    labelled_entries = zip(report.entries, entry_names(report.entries), strict=True)
    return tuple(
        Subject(entry, compare_run_with_predictions(entry.run, entry.time_ms), label)
        for entry, label in labelled_entries
    )


def find_subject(
    subjects: Sequence[Subject], like: Subject, split: Parallelism, *, same_batch: bool = False
) -> Subject | None:
    """Return the first row with a given parallelism that can be compared with `like`; None if there is none.

    Such a row agrees with `like` in all properties of `Subject.cohort`, such as the model.

    Args:
        subjects: All rows.
        like: The row to compare with.
        split: The parallelism to search for.
        same_batch: True if the batch of the row must equal that of `like`.
    """
    batch = like.run.spec and like.run.spec.batch
    for subject in subjects:
        if subject.split != split or subject.cohort != like.cohort:
            continue
        if not same_batch or (subject.run.spec and subject.run.spec.batch) == batch:
            return subject
    return None
