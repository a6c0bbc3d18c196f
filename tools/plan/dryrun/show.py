"""Dry runs for people and as data, each figure beside its closed form."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tools.plan.dryrun.comparison import Comparison
from tools.records.measurements import Calls
from tools.spec.model import Model
from tools.spec.run import RunSpec
from tools.spec.strategy import strategy_name

_GIB, _GB = 2**30, 1e9

NOTES = (
    "Attention is Megatron's own in both columns: it keeps its scores, which fused attention does not.",
    "A peak is of live tensors: without context, workspaces, NCCL and the allocator's remainders.",
    "Experts get equal shares of the tokens.",
)


def as_data(model: Model, spec: RunSpec, comparisons: list[Comparison]) -> dict[str, Any]:
    """Everything, for `--json`; bytes and seconds."""
    return {
        "model": model.name,
        "strategy": strategy_name(spec.parallelism),
        "parallelism": asdict(spec.parallelism),
        "micro_batch_size": spec.batch.micro_batch_size,
        "global_batch_size": spec.batch.global_batch_size,
        "microbatches": spec.microbatches,
        "dtype": spec.dtype,
        "seq_length": spec.shape.seq_length,
        "ranks": [_rank_as_data(comparison) for comparison in comparisons],
        "notes": list(NOTES),
    }


def print_comparisons(model: Model, spec: RunSpec, comparisons: list[Comparison]) -> None:
    """A table of figures, then of each rank's calls."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    parallelism, batch = spec.parallelism, spec.batch
    console.print(
        f"{model.name} as {strategy_name(parallelism)} on {parallelism.world_size} ranks: micro batch "
        f"{batch.micro_batch_size}, global batch {batch.global_batch_size}, "
        f"{spec.microbatches} micro batches, sequence {spec.shape.seq_length}, "
        f"{spec.dtype}.",
        highlight=False,
    )
    for comparison in comparisons:
        console.print(figures_table(comparison))
        console.print(_calls_table(comparison))
        console.print(verdict(comparison), highlight=False)
    for note in NOTES:
        console.print(f"[dim]{note}[/dim]", highlight=False)


def figures_table(comparison: Comparison) -> Table:
    """Parameters, bytes and micro batches of one rank: dry run, closed form."""
    report = comparison.report
    where = report.memory.peak_module.removeprefix("module.module.")
    title = (
        f"rank {report.rank}, stage {comparison.pipeline_rank}; its peak is in "
        f"{report.memory.peak_phase}{f' ({where})' if where else ''}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("dry run", justify="right")
    table.add_column("closed form", justify="right")
    table.add_row("parameters", f"{report.parameters:,}", f"{comparison.parameters:,}")
    sent = report.communication.wire_bytes
    table.add_row("bytes sent", f"{sent:,}", f"{comparison.wire_bytes:,}")
    table.add_row("micro batches in flight", str(report.in_flight), str(comparison.in_flight))
    for name, (measured, closed) in comparison.memory.items():
        table.add_row(f"{name}, GiB", f"{measured / _GIB:,.3f}", f"{closed / _GIB:,.3f}")
    for phase, size in report.memory.phase_peak_bytes.items():
        table.add_row(f"peak in {phase}, GiB", f"{size / _GIB:,.3f}", "")
    return table


def verdict(comparison: Comparison) -> str:
    """Whether the closed form holds, or every difference by name."""
    report = comparison.report
    cost = f"({report.seconds:.1f} s, {report.process_bytes / _GIB:.2f} GiB of this machine)"
    if comparison.agrees:
        calls = sum(row.calls for row in report.communication.calls if row.ranks > 1)
        return f"Parameters and all {calls:,} calls equal the closed form, byte for byte {cost}."
    return "\n".join(["The closed form differs:", *map(str, comparison.differences), cost])


def _rank_as_data(comparison: Comparison) -> dict[str, Any]:
    report = comparison.report
    return {
        "rank": report.rank,
        "pipeline_rank": comparison.pipeline_rank,
        "agrees": comparison.agrees,
        "differences": [asdict(difference) for difference in comparison.differences],
        "closed_form": {
            "parameters": comparison.parameters,
            "wire_bytes": comparison.wire_bytes,
            "in_flight": comparison.in_flight,
            "memory": {name: closed for name, (_, closed) in comparison.memory.items()},
        },
        "parameters": report.parameters,
        "in_flight": report.in_flight,
        "wire_bytes": report.communication.wire_bytes,
        "memory": msgspec.to_builtins(report.memory),
        "calls": [_call_as_data(row) for row in report.communication.calls],
        "seconds": report.seconds,
        "process_bytes": report.process_bytes,
    }


def _call_as_data(row: Calls) -> dict[str, Any]:
    # How long a call that moves nothing took says nothing.
    without = {"wait_seconds", "transfer_seconds"}
    return {name: value for name, value in asdict(row).items() if name not in without}


def _calls_table(comparison: Comparison) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("group", "operation", "phase"):
        table.add_column(name)
    for name in ("ranks", "calls", "bytes a call", "GB sent"):
        table.add_column(name, justify="right")
    rows = [row for row in comparison.report.communication.calls if row.ranks > 1]
    for row in sorted(rows, key=lambda row: -row.wire_bytes):
        if row.wire_bytes:
            table.add_row(
                row.group,
                row.operation,
                row.phase,
                str(row.ranks),
                f"{row.calls:,}",
                f"{row.payload_bytes:,}",
                f"{row.wire_bytes / _GB:,.3f}",
            )
    return table
