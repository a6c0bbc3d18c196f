"""Predicted beside measured, a rank, by component, with residuals.

Predictions are `tools.plan`'s closed forms; measurements are the log and the run's ledgers. What is
missing on either side is said in `notes`, never filled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.plan.parameters import UnevenSplitError, rank_parameters
from tools.records.measurements import TimeRecord
from tools.records.run import COMMUNICATION_FILE, MEMORY_FILE, TIME_FILE
from tools.report.explain.closed_form import (
    NoClosedFormError,
    configuration_of_run,
    kernels_of_run,
    known_ranks,
    megatron_of_run,
)
from tools.report.explain.predicted_bubble import compare_bubble
from tools.report.explain.predicted_calls import CallComparison, compare_calls
from tools.report.explain.predicted_memory import compare_memory
from tools.report.explain.residual import Compared
from tools.report.explain.time_shares import (
    TimeShares,
    read_time_ledger,
    time_shares,
    with_pipeline_waits,
)
from tools.report.read.runs import Run
from tools.spec.run import RunSpec


@dataclass(frozen=True)
class Findings:
    """Everything the ledgers of one run say, beside what the closed forms say."""

    times: TimeRecord | None = None
    shares: tuple[TimeShares, ...] = ()
    parameters: tuple[Compared, ...] = ()
    calls: tuple[CallComparison, ...] = ()
    memory: tuple[Compared, ...] = ()
    bubble: tuple[Compared, ...] = ()
    configuration: RunSpec | None = None
    """None where no closed form applies; `notes` says why."""
    notes: tuple[str, ...] = ()


def findings_of(run: Run) -> Findings:
    """Compare one run with its closed forms; whatever is missing becomes a note."""
    times, problem = _times(run)
    times = with_pipeline_waits(times, run.ledgers.communication) if times else None
    notes = [*_missing(run), *([problem] if problem else [])]
    shares = time_shares(times) if times else ()
    try:
        configuration = configuration_of_run(run)
        return Findings(
            times=times,
            shares=shares,
            parameters=tuple(_parameters(run, configuration)),
            calls=tuple(_calls(run, configuration)),
            memory=tuple(_memory(run, configuration)),
            bubble=compare_bubble(configuration, times) if times else (),
            configuration=configuration,
            notes=tuple(notes),
        )
    except (NoClosedFormError, UnevenSplitError) as error:
        return Findings(times, shares, notes=(*notes, f"nothing predicted: {error}"))


def _times(run: Run) -> tuple[TimeRecord | None, str]:
    times, problem = read_time_ledger(run.path)
    if times is not None and run.setup.device != "cpu":
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


def _parameters(run: Run, configuration: RunSpec) -> Iterator[Compared]:
    """Megatron's own count of every model-parallel rank; its first data-parallel rank stands for all."""
    split = configuration.parallelism
    for count in run.log.parameters:
        if count.pipeline_rank >= split.pipeline or count.tensor_rank >= split.tensor:
            continue
        predicted = rank_parameters(configuration.shape, split, count.pipeline_rank).total
        ranks_a_stage = split.world_size // split.pipeline
        rank = count.pipeline_rank * ranks_a_stage + count.tensor_rank
        yield Compared(rank, "parameters", count.parameters, predicted)


def _calls(run: Run, configuration: RunSpec) -> Iterator[CallComparison]:
    record = run.ledgers.communication
    if record is None:
        return
    wanted = known_ranks(configuration, tuple(rank.rank for rank in record.ranks))
    for rank in record.ranks:
        if rank.rank in wanted and rank.steady_iterations:
            yield compare_calls(configuration, rank, megatron_of_run(run))


def _memory(run: Run, configuration: RunSpec) -> Iterator[Compared]:
    record = run.ledgers.memory
    if record is None:
        return
    wanted = known_ranks(configuration, tuple(rank.rank for rank in record.ranks))
    for rank in record.ranks:
        if rank.rank in wanted:
            yield from compare_memory(configuration, rank, kernels_of_run(run))
