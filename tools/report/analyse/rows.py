"""One line of `results.csv` for each configuration; the columns are a contract."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tools.plan.tensors import parameters_total
from tools.report.analyse.comparability import adam_state
from tools.report.analyse.configurations import Configuration
from tools.report.analyse.no_te import bare_notes
from tools.report.analyse.parity import Parity
from tools.report.analyse.rates import Rates
from tools.report.read.runs import Run
from tools.spec.strategy import Sharding

_MIB = 2**20
_ZERO_STAGES = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3, Sharding.FSDP2: 3}


@dataclass(frozen=True)
class Row:
    """The contract's columns in their order; None is an empty cell."""

    run: str
    status: str
    backend: str | None
    strategy: str | None
    model: str | None
    device: str | None
    world_size: int | None
    dp: int | None
    tp: int | None
    sp: int | None
    """1 with sequence parallelism, 0 without."""
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    zero_stage: int | None
    micro_batch_size: int | None
    global_batch_size: int | None
    seq_length: int | None
    dtype: str | None
    iterations: int
    """Iterations of the newest run."""
    iteration_ms_median: float | None
    iteration_ms_ci_low: float | None
    iteration_ms_ci_high: float | None
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    model_tflops_per_device: float | None
    mfu: float | None
    peak_tflops: float | None
    peak_memory_bytes: int | None
    peak_memory_rank: int | None
    device_memory_bytes: int | None
    comm_bytes_per_iteration: int | None
    parameters_total: int | None
    parameters_max_rank: int | None
    final_loss: float | None
    parity: str | None
    notes: str


COLUMNS = tuple(field.name for field in fields(Row))


def row_of(configuration: Configuration, rates: Rates, parity: Parity) -> Row:
    """The row of a configuration."""
    run = configuration.newest
    setup, split, batch = run.setup, run.setup.parallelism, run.setup.batch
    estimate = configuration.estimate
    memory, memory_rank = peak_memory(run)
    sent = run.ledgers.sent_bytes_by_rank
    return Row(
        run=run.name,
        status=run.status.status.value,
        backend=setup.backend or None,
        strategy=setup.strategy or None,
        model=setup.model or None,
        device=setup.device or None,
        world_size=setup.world_size,
        dp=split.data if split else None,
        tp=split.tensor if split else None,
        sp=int(split.sequence_parallel) if split else None,
        pp=split.pipeline if split else None,
        vpp=split.virtual_stages if split else None,
        cp=split.context if split else None,
        ep=split.expert if split else None,
        zero_stage=_ZERO_STAGES.get(split.sharding, 0) if split else None,
        micro_batch_size=batch.micro_batch_size or None if batch else None,
        global_batch_size=batch.global_batch_size if batch else None,
        seq_length=setup.seq_length,
        dtype=setup.dtype or None,
        iterations=len(run.log.iterations),
        iteration_ms_median=estimate.median if estimate else None,
        iteration_ms_ci_low=estimate.low if estimate else None,
        iteration_ms_ci_high=estimate.high if estimate else None,
        tokens_per_second=rates.tokens_per_second,
        tokens_per_second_per_device=rates.tokens_per_second_per_device,
        model_tflops_per_device=rates.model_tflops_per_device,
        mfu=rates.mfu,
        peak_tflops=rates.peak_tflops,
        peak_memory_bytes=memory,
        peak_memory_rank=memory_rank,
        device_memory_bytes=device_memory(run),
        comm_bytes_per_iteration=max(sent.values(), default=None),
        parameters_total=_parameters_total(run),
        parameters_max_rank=max((c.parameters for c in run.log.parameters), default=None),
        final_loss=final_loss(run),
        parity=parity.verdict or None,
        notes="; ".join(_notes(configuration, rates, parity)),
    )


def peak_memory(run: Run) -> tuple[int | None, int | None]:
    """Largest peak of any rank and that rank: the ledger's, else the allocator's in the log."""
    by_rank = memory_by_rank(run)
    if not by_rank:
        return None, None
    rank = max(by_rank, key=lambda r: (by_rank[r], -r))
    return by_rank[rank], rank


def memory_by_rank(run: Run) -> dict[int, int]:
    """Peak bytes by rank. Megatron prints them only on ranks that are first of their DP group."""
    if run.ledgers.peak_memory_bytes_by_rank:
        return dict(run.ledgers.peak_memory_bytes_by_rank)
    peaks: dict[int, int] = {}
    for reading in run.log.memory:
        # Ranks without a device's allocator print zeros.
        if math.isfinite(reading.max_allocated_mib) and reading.max_allocated_mib > 0:
            size = round(reading.max_allocated_mib * _MIB)
            peaks[reading.rank] = max(peaks.get(reading.rank, 0), size)
    return peaks


def device_memory(run: Run) -> int | None:
    """The device's own largest reading; a CPU rank's resident memory is no such reading."""
    return None if run.setup.device == "cpu" else run.samples.peak_memory_bytes


def final_loss(run: Run) -> float | None:
    """Loss of the last line that is not an average."""
    for found in reversed(run.log.iterations):
        loss = found.lm_loss
        if loss is not None and math.isfinite(loss):
            usable = not found.averaged and not found.skipped_iterations
            if usable:
                return loss
    return None


def _parameters_total(run: Run) -> int | None:
    setup = run.setup
    if setup.shape is not None and setup.parallelism is not None:
        return parameters_total(setup.shape, setup.parallelism.tensor)
    return None


def _notes(configuration: Configuration, rates: Rates, parity: Parity) -> list[str]:
    run = configuration.newest
    notes = [run.status.reason] if run.status.reason else []
    if len(configuration.runs) > 1:
        notes.append(f"{len(configuration.runs)} runs pooled")
    if configuration.failed_before:
        notes.append(f"{configuration.failed_before} earlier failed")
    if configuration.superseded:
        notes.append(f"{configuration.superseded} older under other versions not shown")
    if parity.parted:
        notes.append(f"from iteration {parity.parted} on tokens took other experts; not compared")
    if parity.reason:
        notes.append(f"loss not comparable: {parity.reason}")
    elif parity.verdict.startswith("broken") and not parity.repeats:
        notes.append("parity tolerance is the rounding alone: no repeat was run")
    if adam_state(run) not in (None, "existed"):
        notes.append("Adam's state never existed (every step skipped), so memory reads too low")
    return [*bare_notes(run), *notes, *rates.notes, *run.notes]
