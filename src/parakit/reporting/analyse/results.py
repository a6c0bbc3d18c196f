"""Define the columns of `results.csv`, and write the notes of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from parakit.config.run import RunSpec
from parakit.config.strategy import Parallelism
from parakit.costs import total_parameters
from parakit.formatting.table import Column
from parakit.formatting.units import number
from parakit.logs import Run
from parakit.reporting.analyse.comparability import SHARED, describe_adam_state
from parakit.reporting.analyse.configurations import Configuration, describe_patch_file
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.parity import REFERENCE, Parity, resumption_sentence
from parakit.reporting.analyse.rates import attention_variant
from parakit.reporting.analyse.statistics import Estimate


def write_row_notes(entry: Entry) -> str:
    """Return the notes on a row as one text, the most important first, separated by semicolons."""
    notes = [
        *_spec_notes(entry.spec),
        *_run_notes(entry),
        *_model_notes(entry),
        *_parity_notes(entry.parity, entry.run),
        resumption_sentence(entry.run),
    ]
    if describe_adam_state(entry.run) not in (None, "existed"):
        notes.append("Adam's state never existed (every step skipped), so memory reads too low")
    notes += [*entry.rates.notes, *entry.run.notes]
    text = "; ".join(note for note in notes if note)
    # Notes that are sentences lose their full stop before a semicolon.
    return text.replace(".; ", "; ")


def _spec_notes(spec: RunSpec | None) -> Iterator[str]:
    """Yield the notes on what was patched and on a shared GPU; yield nothing for an unknown configuration."""
    if spec is None:
        return
    if spec.patch_file:
        yield f"changed by PATCH_FILE={describe_patch_file(spec)}"
    if spec.shares_gpu:
        yield SHARED
    if spec.fused:
        yield f"patches: {', '.join(spec.fused)}"


def _run_notes(entry: Entry) -> Iterator[str]:
    """Yield the notes on the runs of a row: status, repeats, changes within the run, and runs that are not shown.

    A note may be empty.
    """
    row = entry.configuration
    yield entry.run.status.reason
    if len(row.runs) > 1:
        yield f"{len(row.runs)} runs pooled"
    if entry.estimate and entry.estimate.repeats_disagree:
        yield f"repeats disagree: {describe_disagreement(entry)}"
    for change in entry.changes_within_run:
        yield change.text
    yield from describe_other_attempts(row)
    other_versions = row.superseded - row.other_code
    if row.other_code:
        yield f"{row.other_code} older under other code not shown"
    if other_versions:
        yield f"{other_versions} older under other versions not shown"


def _model_notes(entry: Entry) -> Iterator[str]:
    """Yield a note if a rank printed another number of parameters than the model has."""
    doubt = entry.rates.model_doubt
    if not doubt:
        return
    text = "parameters in total are empty"
    if entry.rates.model_tflops_per_device is not None:
        text += " and TFLOP/s are doubtful"
    yield f"{text}: {doubt}"


def _parameters_total(entry: Entry) -> int | None:
    """Return the number of distinct parameters of a row's model, computed by formula.

    None means that the model is unknown, that its attention has no formula, or that a rank printed another
    number.
    """
    spec = entry.spec
    if spec is None or not spec.shape.vocabulary or attention_variant(entry.run):
        return None
    if entry.rates.model_doubt:
        return None
    return total_parameters(spec.shape, spec.parallelism.tensor)


def _parity_notes(parity: Parity, run: Run) -> Iterator[str]:
    """Yield the notes on the loss verdict of a row. A note may be empty."""
    yield parity.repeats_differ
    if parity.judged not in ("", run.name) and parity.verdict != REFERENCE:
        yield f"parity is that of {parity.judged}"
    if parity.without_baseline:
        yield f"baseline is not its parity's reference: {parity.without_baseline}"
    if parity.diverged:
        yield f"from iteration {parity.diverged} on tokens took other experts; not compared"
    if parity.until and not parity.reason:
        yield f"its precision is compared up to iteration {parity.until}"
    if parity.reason:
        yield f"loss not comparable: {parity.reason}"
    elif parity.verdict.startswith("broken") and not parity.repeats and run.device != "cpu":
        yield "parity tolerance is rounding alone: no repeat was run"


def describe_disagreement(entry: Entry) -> str:
    """Return by how much a row's repeats scatter; empty for a single run."""
    estimate = entry.estimate
    if estimate is None or estimate.scatter_between_runs is None:
        return ""
    medians = [
        median(run.window.samples_ms) for run in entry.configuration.runs if run.has_measurements
    ]
    return (
        f"their medians are {number(min(medians))} to {number(max(medians))} ms, a scatter of "
        f"{estimate.scatter_between_runs:.1%} where {estimate.scatter.assumed:.1%} is known of others"
    )


def describe_other_attempts(configuration: Configuration) -> list[str]:
    """Return the numbers of earlier failed attempts and of running ones, as texts; empty without any."""
    failed, running = configuration.failed_before, configuration.running
    counts = {"earlier failed": len(failed), "running": len(running)}
    return [f"{count} {status}" for status, count in counts.items() if count]


def _spec_column(value: Callable[[RunSpec], Any]) -> Callable[[Entry], Any]:
    """Return a column's function over the run's configuration; None if that is unknown."""
    return lambda entry: value(entry.run.spec) if entry.run.spec else None


def _degree_column(value: Callable[[Parallelism], int]) -> Callable[[Entry], Any]:
    """Return a column's function over the run's parallelism; None if that is unknown."""
    return _spec_column(lambda spec: value(spec.parallelism))


def _estimate_column(value: Callable[[Estimate], float | None]) -> Callable[[Entry], Any]:
    """Return a column's function over the row's time; None without a time."""
    return lambda entry: value(entry.estimate) if entry.estimate else None


RESULTS: tuple[Column[Entry], ...] = (
    Column("run", lambda e: e.run.name),
    Column("status", lambda e: e.status),
    Column("backend", lambda e: e.backend or None),
    Column("strategy", lambda e: e.strategy or None),
    Column("model", lambda e: e.run.model or None),
    Column("device", lambda e: e.run.device or None),
    Column("world_size", _degree_column(lambda split: split.world_size)),
    Column("dp", _degree_column(lambda split: split.data)),
    Column("tp", _degree_column(lambda split: split.tensor)),
    Column("sp", _degree_column(lambda split: int(split.sequence_parallel))),
    Column("pp", _degree_column(lambda split: split.pipeline)),
    Column("vpp", _degree_column(lambda split: split.virtual_stages)),
    Column("cp", _degree_column(lambda split: split.context)),
    Column("ep", _degree_column(lambda split: split.expert)),
    Column("zero_stage", _degree_column(lambda split: split.sharding.stage)),
    Column("micro_batch_size", _spec_column(lambda spec: spec.batch.micro_batch_size or None)),
    Column("global_batch_size", lambda e: e.run.global_batch_size),
    Column("seq_length", _spec_column(lambda spec: spec.shape.seq_length)),
    Column("dtype", _spec_column(lambda spec: spec.dtype)),
    # Columns from here on show the newest run, but for the times.
    Column("iterations", lambda e: len(e.run.log.iterations)),
    Column("iteration_ms_median", _estimate_column(lambda estimate: estimate.median)),
    Column("iteration_ms_ci_low", _estimate_column(lambda estimate: estimate.low)),
    Column("iteration_ms_ci_high", _estimate_column(lambda estimate: estimate.high)),
    Column("tokens_per_second", lambda e: e.rates.tokens_per_second),
    Column("tokens_per_second_per_device", lambda e: e.rates.tokens_per_second_per_device),
    Column("model_tflops_per_device", lambda e: e.rates.model_tflops_per_device),
    Column("mfu", lambda e: e.rates.mfu),
    Column("peak_tflops", lambda e: e.rates.peak_tflops),
    Column("peak_memory_bytes", lambda e: e.peak_bytes),
    Column("peak_memory_rank", lambda e: e.peak_rank),
    Column("device_memory_bytes", lambda e: e.device_bytes),
    Column("comm_bytes_per_iteration", lambda e: e.sent_bytes),
    Column("parameters_total", _parameters_total),
    Column("parameters_max_rank", lambda e: e.largest_parameters),
    Column("final_loss", lambda e: e.final_loss),
    Column("parity", lambda e: e.parity.verdict or None),
    Column("notes", write_row_notes),
)
"""Columns of `results.csv`: their names and order are a contract. None, an empty cell, is unknown."""
