"""Rows and tables from the run folders of `make bench NAME=gpu`."""

import gzip
import json
from pathlib import Path

import pytest

from parakit.artifacts.io import write_record
from parakit.artifacts.run import STATUS_FILE, Status, StatusRecord
from parakit.config import variables
from parakit.config.run import DeviceKind
from parakit.logs.traces import TRACE
from tests.bench.gpu_runs import (
    FOLDER,
    BenchRow,
    Ceilings,
    bench_tables,
    read_bench,
    write_ceilings,
)
from tests.reporting.factory import log_text, run_record, write_run

PROFILED = ("--profile", "--profile-step-start", "64", "--profile-step-end", "67")


def made(
    runs: Path,
    setting: str,
    ms: float = 400.0,
    count: int = 32,
    name: str = "20260101T000000Z-a",
    status: StatusRecord | None = None,
    **changes: object,
) -> Path:
    """Write a run of a setting: warm-up iterations take twice `ms`, timed ones `ms` with a millisecond of scatter."""
    record = run_record(name, exit_interval=32, **changes)
    times = [ms * (2 if n <= 12 else 1) + n % 3 - 1 for n in range(1, count + 1)]
    folder = write_run(runs / FOLDER / setting, record, log_text(times))
    if status:
        write_record(folder / STATUS_FILE, status)
    return folder


def row_of(runs: Path) -> BenchRow:
    bench = read_bench(runs)
    assert bench is not None
    (row,) = bench.rows
    return row


def test_run_counts_with_its_iterations_after_the_warm_up(tmp_path: Path) -> None:
    made(tmp_path, "bf16", dtype="bf16", environment={variables.FUSED: "norm"})
    row = row_of(tmp_path)
    assert row.entry is not None
    assert row.entry.run.window.iterations == tuple(range(13, 33))
    assert (row.name, row.dtype, row.fused, row.note) == ("bf16", "bf16", ("norm",), "")


def test_profiled_iterations_are_not_timed(tmp_path: Path) -> None:
    argv = (*run_record("r").argv, *PROFILED)
    made(tmp_path, "published", argv=argv, count=68)
    row = row_of(tmp_path)
    assert row.entry is not None
    assert row.entry.run.window.iterations == tuple(range(13, 63))
    assert row.note.startswith("the profiler's trace cannot be read: ")


def test_a_run_that_is_too_short_is_no_result(tmp_path: Path) -> None:
    made(tmp_path, "bf16", count=27)
    row = row_of(tmp_path)
    assert row.entry is None
    assert "has 15 of 20 timed iterations" in row.note


def test_timed_iterations_of_a_crashed_run_count_with_a_note(tmp_path: Path) -> None:
    made(tmp_path, "bf16", status=StatusRecord(Status.CRASHED, 1, "It fell over."))
    row = row_of(tmp_path)
    assert row.entry is not None
    assert row.entry.time_ms == pytest.approx(400)
    assert row.note == "crashed: It fell over."


def test_run_that_crashed_before_timing_has_a_reason(tmp_path: Path) -> None:
    made(tmp_path, "bf16", count=20, status=StatusRecord(Status.CRASHED, 1, "It fell over."))
    assert (row_of(tmp_path).entry, row_of(tmp_path).note) == (None, "crashed: It fell over.")


def test_row_contains_repeats_under_equal_conditions_only(tmp_path: Path) -> None:
    made(tmp_path, "bf16", 900, name="20260101T000000Z-a", software={"torch": "2.9.0"})
    made(tmp_path, "old", 900, name="20260101T000100Z-a", software={"torch": "2.9.0"})
    made(tmp_path, "bf16", 800, name="20260101T000200Z-a", dtype="bf16")
    made(tmp_path, "bf16", 400, name="20260101T000300Z-a")
    made(tmp_path, "bf16", 402, name="20260101T000400Z-a")
    row = row_of(tmp_path)
    assert row.entry is not None
    assert row.entry.time_ms == pytest.approx(401)
    assert len(row.entry.configuration.runs) == 2


@pytest.mark.parametrize("trace", [b"", gzip.compress(b'{"traceEvents": []}')[:-9]])
def test_unreadable_trace_gives_a_note_and_times_still_count(trace: bytes, tmp_path: Path) -> None:
    folder = made(tmp_path, "published", count=68, argv=(*run_record("r").argv, *PROFILED))
    (folder / TRACE).parent.mkdir()
    (folder / TRACE).write_bytes(trace)
    row = row_of(tmp_path)
    assert row.entry is not None
    assert row.note.startswith("the profiler's trace cannot be read: ")


def traced(folder: Path, *events: dict[str, object]) -> None:
    (folder / TRACE).parent.mkdir()
    data = json.dumps({"traceEvents": events}).encode()
    (folder / TRACE).write_bytes(gzip.compress(data))


STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9000}
PRODUCT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 5000}


@pytest.mark.parametrize(("device", "seen"), [(DeviceKind.CPU, True), (DeviceKind.GPU, False)])
def test_trace_without_gpu_kernels_gives_no_kernel_split(
    device: DeviceKind, seen: bool, tmp_path: Path
) -> None:
    argv = (*run_record("r").argv, *PROFILED)
    traced(made(tmp_path, "published", count=68, argv=argv, device=device), STEP, PRODUCT)
    row = row_of(tmp_path)
    assert (dict(row.kernels_ms) == {"GEMM": 5.0, "gaps": 4.0}) == seen
    assert ("saw nothing of the GPU" in row.note) != seen


def test_table_compares_settings_with_published_mark_and_floor(tmp_path: Path) -> None:
    argv = (*run_record("r").argv, *PROFILED)
    traced(made(tmp_path, "published", 438.0, count=68, argv=argv), STEP, PRODUCT)
    made(tmp_path, "published", 440.0, count=68, name="20260101T000200Z-a", argv=argv)
    made(tmp_path, "bf16", 219.0, name="20260101T000300Z-a", dtype="bf16")
    flops = 4e9
    write_ceilings(tmp_path, Ceilings(flops, 4e12))
    times, kernels = bench_tables(read_bench(tmp_path))
    assert "TFLOP/s, large copy 4.00 TB/s)" in times.title
    assert times.lines[0][:6] == ("published", "fp32", "none", "439.0", "438.0, 440.0", "×1.002")
    assert times.lines[1][3:6] == ("219.0", "219.0", "×0.500")
    of_floor = [float(line[6].removeprefix("×")) for line in times.lines]
    assert of_floor[0] / of_floor[1] == pytest.approx(439 / 219, rel=1e-2)
    assert kernels.lines == (("GEMM", "5.0"), ("gaps", "4.0"))


def test_folder_without_a_bench_gives_no_table(tmp_path: Path) -> None:
    assert read_bench(tmp_path) is None
    assert bench_tables(None) == ()
