"""The tables of `make bench-gpu`: columns over the report's row, and an iteration's time by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tools.records.gpu_bench import MARK_MS
from tools.report.analyse.entry import Entry, device_memory
from tools.report.analyse.gpu_bench import Bench, BenchRow
from tools.text.table import TextTable
from tools.text.units import DASH, size

_HEADER = (
    *("Setting", "Precision", "Patches", "ms/iteration", "Runs' medians", "Of the mark"),
    *("Of the floor", "TFLOP/s", "Allocated, peak", "Device memory", "Last loss", "Note"),
)


def bench_tables(bench: Bench | None) -> tuple[TextTable, ...]:
    """Settings beside mark and floor, and the split of an iteration; nothing without a bench."""
    if bench is None:
        return ()
    floor = _floor_ms(bench)
    lines = tuple(_line(row, floor) for row in bench.rows)
    times = TextTable("gpu-bench", _title(bench, floor), _HEADER, lines)
    split = _kernels(bench.rows)
    return (times, split) if split else (times,)


def bench_text(bench: Bench) -> str:
    """The same for a terminal, a line a setting."""
    parts = []
    for table in bench_tables(bench):
        rows = [table.header, *table.lines]
        parts.append("\n".join((table.title, *("  ".join(row) for row in rows))))
    return "\n\n".join(parts)


def _any_entry(bench: Bench) -> Entry | None:
    return next((row.entry for row in bench.rows if row.entry), None)


def _floor_ms(bench: Bench) -> float | None:
    """Time of an iteration at the rate of the large matrix product."""
    entry = _any_entry(bench)
    flops = entry.rates.model_flops_per_iteration if entry else None
    return 1000 * flops / bench.ceilings.matmul_flops if flops and bench.ceilings else None


def _title(bench: Bench, floor: float | None) -> str:
    entry = _any_entry(bench)
    record = entry.run.record if entry else None
    where = f" on one {entry.run.device}" if entry else ""
    torch = record.software.get("torch", DASH) if record else DASH
    title = (
        f"GPU bench: gpt2-large{where} without Transformer Engine, torch {torch}, mark "
        f"{MARK_MS:.0f} ms (one H200 with it)"
    )
    if floor is None or bench.ceilings is None:
        return title
    return (
        f"{title}, floor {floor:.0f} ms (large bf16 product {bench.ceilings.matmul_flops / 1e12:.0f} "
        f"TFLOP/s, large copy {bench.ceilings.copy_bytes_per_second / 1e12:.2f} TB/s)"
    )


def _line(row: BenchRow, floor: float | None) -> tuple[str, ...]:
    names, entry = (row.name, row.dtype, ", ".join(row.fused) or "none"), row.entry
    if entry is None or entry.time_ms is None:
        return (*names, *(DASH,) * (len(_HEADER) - len(names) - 1), row.note)
    runs, window = entry.configuration.runs, entry.run.window
    flops, loss = entry.rates.model_tflops_per_device, entry.losses.get(window.iterations[-1])
    return (
        *names,
        f"{entry.time_ms:.1f}",
        ", ".join(f"{median(run.window.samples_ms):.1f}" for run in runs),
        f"×{entry.time_ms / MARK_MS:.3f}",
        f"×{entry.time_ms / floor:.3f}" if floor else DASH,
        f"{flops:.1f}" if flops else DASH,
        size(entry.peak_bytes),
        size(device_memory(entry.run)),
        f"{loss:.4f}" if loss is not None else DASH,
        row.note,
    )


def _kernels(rows: Sequence[BenchRow]) -> TextTable | None:
    split = {row.name: row.kernels_ms for row in rows if row.kernels_ms}
    if not split:
        return None
    groups = list(dict.fromkeys(group for found in split.values() for group in found))
    lines = tuple(
        (group, *(f"{found[group]:.1f}" if group in found else DASH for found in split.values()))
        for group in groups
    )
    header = ("Kernels", *(f"{name}, ms" for name in split))
    return TextTable(
        "gpu-bench-kernels", "GPU bench: milliseconds an iteration by kernels", header, lines
    )
