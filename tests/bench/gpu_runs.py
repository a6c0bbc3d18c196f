"""Rows and tables of what `make bench NAME=gpu` measured. A row holds repeats of a setting under equal conditions:
`python -m tests.bench.gpu_runs runs`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status
from parakit.config.flags import Flags
from parakit.config.run import DeviceKind
from parakit.formatting.table import TextTable
from parakit.formatting.units import DASH, size
from parakit.logs.runs import Run, find_run_folders, load_runs
from parakit.logs.traces import read_group_milliseconds
from parakit.logs.window import Window
from parakit.reporting.analyse.configurations import build_row_identity
from parakit.reporting.analyse.entry import Entry, build_entries

FOLDER, FILE = "bench-gpu", "ceilings.json"
"""Path `runs/bench-gpu/ceilings.json`. The runs of a setting are in a folder of its name in `runs/bench-gpu`."""

MARK_MS = 438.0
"""The H200 notes: gpt2-large, micro batch 32, one H200, Transformer Engine in NVIDIA's container."""

WARM_UP = 12
"""Iterations that are not timed: compilers work, and the first updates allocate Adam's state."""


@dataclass(frozen=True)
class Ceilings:
    """Highest rates of the device, measured in addition to the runs."""

    matmul_flops: float
    """FLOP/s of a large bf16 matrix product."""
    copy_bytes_per_second: float
    """Bytes per second that a large copy reads and writes."""


def timed_iterations(flags: Sequence[str], iterations: int) -> range:
    """Return the iterations between the warm-up and the profiler."""
    parsed = Flags(flags)
    profiled = parsed.integer("--profile-step-start") if parsed.has("--profile") else None
    return range(WARM_UP + 1, profiled - 1 if profiled else iterations + 1)


def read_ceilings(runs: Path) -> Ceilings | None:
    """Return the ceilings of a folder of runs, or None if they were not measured.

    Raises:
        msgspec.DecodeError: The file is not JSON of this shape.
    """
    path = runs / FOLDER / FILE
    return msgspec.json.decode(path.read_bytes(), type=Ceilings) if path.is_file() else None


def write_ceilings(runs: Path, ceilings: Ceilings) -> None:
    """Write the ceilings atomically."""
    path = runs / FOLDER / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, ceilings)


FEWEST = 0.8
"""Fraction of the timed iterations that must count, because fp16 skips updates now and then."""


@dataclass(frozen=True)
class BenchRow:
    """A setting and its runs, with a note if no run counts."""

    name: str
    dtype: str
    fused: tuple[str, ...]
    entry: Entry | None = None
    kernels_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds per iteration by group of kernels; empty without a trace."""
    note: str = ""
    """Problem of the runs, which may have occurred after the timed iterations that count."""


@dataclass(frozen=True)
class Bench:
    """Rows and ceilings of the bench in a folder of runs."""

    rows: tuple[BenchRow, ...]
    """Rows in the order of their first runs."""
    ceilings: Ceilings | None = None


def read_bench(runs: Path) -> Bench | None:
    """Return the bench below a folder of runs, or None if there is none.

    Raises:
        OSError: A folder cannot be read.
        msgspec.DecodeError: The ceilings are not JSON of their shape.
    """
    ceilings, root = read_ceilings(runs), runs / FOLDER
    folders = [folder for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []
    runs_by_setting = [(folder.name, load_runs(find_run_folders(folder))[0]) for folder in folders]
    settings = sorted(
        ((name, setting_runs) for name, setting_runs in runs_by_setting if setting_runs),
        key=lambda it: it[1][0].name,
    )
    if not settings:
        return None
    newest = max(
        (run for _, setting_runs in settings for run in setting_runs), key=lambda run: run.name
    )
    rows = []
    for name, setting_runs in settings:
        # A run counts if it trained what the last run of its setting trained, on the machine of the newest run.
        kept = [
            run
            for run in setting_runs
            if build_row_identity(run) == build_row_identity(setting_runs[-1])
            and _where(run) == _where(newest)
        ]
        if kept:
            rows.append(_row(name, list(map(_timed, kept))))
    return Bench(tuple(rows), ceilings)


def _where(run: Run) -> tuple[object, ...]:
    """Return the conditions under which runs are comparable: software, image and devices."""
    record = run.record
    return (record.software, record.image, record.host.devices) if record else ()


def _timed(run: Run) -> Run:
    """Return the run with the timed iterations as its window. A run that crashed after them counts."""
    assert run.record is not None
    wanted = timed_iterations(run.record.argv, run.record.exit_interval)
    milliseconds = {
        iteration.iteration: iteration.elapsed_ms
        for iteration in run.log.iterations
        if iteration.iteration in wanted
        and not iteration.skipped_iterations
        and iteration.elapsed_ms is not None
    }
    note = "" if run.status.status is Status.OK else f"{run.status.status}: {run.status.reason}"
    if len(milliseconds) < FEWEST * len(wanted):
        few = f"{run.name} has {len(milliseconds)} of {len(wanted)} timed iterations that were not skipped"
        return replace(run, window=Window(), notes=(note or few,))
    status = run.status if not note else replace(run.status, status=Status.INCOMPLETE)
    window = Window(tuple(milliseconds.values()), tuple(milliseconds), run.window.global_batch_size)
    return replace(run, window=window, status=status, notes=(note,) if note else ())


def _row(name: str, runs: Sequence[Run]) -> BenchRow:
    counting = [run for run in runs if run.has_measurements]
    spec = runs[-1].spec
    assert spec is not None
    row = BenchRow(name, spec.dtype, spec.fused)
    if not counting:
        return replace(row, note=runs[-1].notes[0])
    (entry,) = build_entries([counting[::-1]])
    kernels, problem = _kernels(counting)
    notes = (*(note for run in counting for note in run.notes), problem)
    return replace(row, entry=entry, kernels_ms=kernels, note="; ".join(filter(None, notes)))


_HEADER = (
    *("Setting", "Precision", "Patches", "ms/iteration", "Runs' medians", "Of the mark"),
    *("Of the floor", "TFLOP/s", "Allocated, peak", "Device memory", "Last loss", "Note"),
)


def bench_tables(bench: Bench | None) -> tuple[TextTable, ...]:
    """Return tables of the settings with published time and lower bound, and of kernels; none without a bench."""
    if bench is None:
        return ()
    entry = next((row.entry for row in bench.rows if row.entry), None)
    record = entry.run.record if entry else None
    where = f" on one {entry.run.device}" if entry else ""
    torch = record.software.get("torch", DASH) if record else DASH
    title = (
        f"GPU bench: gpt2-large{where} without Transformer Engine, torch {torch}, mark "
        f"{MARK_MS:.0f} ms (one H200 with it)"
    )
    flops = entry.rates.model_flops_per_iteration if entry else None
    floor, ceilings = None, bench.ceilings
    if flops and ceilings:
        # The lower bound is the time of an iteration at the rate of the large matrix product.
        floor = 1000 * flops / ceilings.matmul_flops
        title += (
            f", floor {floor:.0f} ms (large bf16 product {ceilings.matmul_flops / 1e12:.0f} "
            f"TFLOP/s, large copy {ceilings.copy_bytes_per_second / 1e12:.2f} TB/s)"
        )
    lines = tuple(_line(row, floor) for row in bench.rows)
    times = TextTable("gpu-bench", title, _HEADER, lines)
    split = _kernel_table(bench.rows)
    return (times, split) if split else (times,)


def bench_text(bench: Bench) -> str:
    """Return the tables as text for a terminal, a line per setting."""
    parts = []
    for table in bench_tables(bench):
        rows = [table.header, *table.lines]
        parts.append("\n".join((table.title, *("  ".join(row) for row in rows))))
    return "\n\n".join(parts)


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
        size(entry.device_bytes),
        f"{loss:.4f}" if loss is not None else DASH,
        row.note,
    )


def _kernels(runs: Sequence[Run]) -> tuple[Mapping[str, float], str]:
    """Return milliseconds per kernel group of the newest run that has them, and the newest run's problem."""
    problem = ""
    for run in reversed(runs):
        if run.record is None or not Flags(run.record.argv).has("--profile"):
            continue
        on_gpu = run.spec is not None and run.spec.device is DeviceKind.GPU
        split, run_problem = read_group_milliseconds(run.path, on_gpu)
        problem = problem or run_problem
        if split:
            return split, problem
    return {}, problem


def _kernel_table(rows: Sequence[BenchRow]) -> TextTable | None:
    split = {row.name: row.kernels_ms for row in rows if row.kernels_ms}
    if not split:
        return None
    groups = list(dict.fromkeys(group for milliseconds in split.values() for group in milliseconds))
    lines = tuple(
        (
            group,
            *(
                f"{milliseconds[group]:.1f}" if group in milliseconds else DASH
                for milliseconds in split.values()
            ),
        )
        for group in groups
    )
    header = ("Kernels", *(f"{name}, ms" for name in split))
    title = "GPU bench: milliseconds an iteration by kernels"
    return TextTable("gpu-bench-kernels", title, header, lines)


if __name__ == "__main__":
    measured = read_bench(Path(sys.argv[1]))
    print(
        bench_text(measured) if measured else f"{sys.argv[1]} has no runs of 'make bench NAME=gpu'."
    )
