"""`make bench-gpu`'s results as tables: beside the published time and the floor, and by kernels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tools.records.gpu_bench import MARK_MS, BenchRun, GpuBench, SettingResult
from tools.text.table import TextTable
from tools.text.units import DASH, GIB

_HEADER = (
    *("Setting", "Precision", "Patches", "ms/iteration", "Runs' medians", "Of the mark"),
    *("Of the floor", "TFLOP/s", "Allocated, peak", "Device memory", "Last loss", "Note"),
)


def bench_tables(bench: GpuBench | None) -> tuple[TextTable, ...]:
    """Settings beside mark and floor, and the split of an iteration; nothing without a bench."""
    if bench is None:
        return ()
    lines = tuple(_line(setting, bench) for setting in bench.settings)
    times = TextTable("gpu-bench", _title(bench), _HEADER, lines)
    split = _split(bench.settings)
    return (times, split) if split else (times,)


def bench_text(bench: GpuBench) -> str:
    """The same for a terminal, a line a setting."""
    parts = []
    for table in bench_tables(bench):
        rows = [table.header, *table.lines]
        parts.append("\n".join((table.title, *("  ".join(row) for row in rows))))
    return "\n\n".join(parts)


def _title(bench: GpuBench) -> str:
    ceilings, floor = bench.ceilings, bench.floor_ms
    title = (
        f"GPU bench: gpt2-large on one {bench.device} without Transformer Engine, torch "
        f"{bench.software.get('torch', DASH)}, mark {MARK_MS:.0f} ms (one H200 with it)"
    )
    if ceilings is None or floor is None:
        return title
    return (
        f"{title}, floor {floor:.0f} ms (large bf16 product {ceilings.matmul_flops / 1e12:.0f} "
        f"TFLOP/s, large copy {ceilings.copy_bytes_per_second / 1e12:.2f} TB/s)"
    )


def _line(setting: SettingResult, bench: GpuBench) -> tuple[str, ...]:
    names = (setting.name, setting.dtype, ", ".join(setting.fused) or "none")
    if not setting.runs:
        return (*names, *(DASH,) * (len(_HEADER) - len(names) - 1), setting.reason)
    medians = [statistics.median(run.iteration_ms) for run in setting.runs]
    middle = statistics.median([ms for run in setting.runs for ms in run.iteration_ms])
    floor = bench.floor_ms
    newest = setting.runs[-1]
    return (
        *names,
        f"{middle:.1f}",
        ", ".join(f"{median:.1f}" for median in medians),
        f"×{middle / MARK_MS:.3f}",
        f"×{middle / floor:.3f}" if floor else DASH,
        f"{bench.model_flops_per_iteration / middle / 1e9:.1f}",
        _size([run.peak_allocated_bytes for run in setting.runs]),
        _size([run.device_memory_bytes for run in setting.runs]),
        f"{newest.losses[-1]:.4f}" if newest.losses else DASH,
        "; ".join(filter(None, (setting.reason, *(run.note for run in setting.runs)))),
    )


def _size(found: Sequence[int | None]) -> str:
    known = [size for size in found if size is not None]
    return f"{max(known) / GIB:.2f} GiB" if known else DASH


def _split(settings: Sequence[SettingResult]) -> TextTable | None:
    split = {s.name: run.groups_ms for s in settings if (run := _profiled(s)) is not None}
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


def _profiled(setting: SettingResult) -> BenchRun | None:
    return next((run for run in reversed(setting.runs) if run.groups_ms), None)
