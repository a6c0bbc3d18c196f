import gzip
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.launch.experiment.bench_gpu.results import bench
from tests.launch.fake_nvml import FakeGpu, FakeNvml, machine_with
from tests.report.factory import log_text, run_record, write_run
from tools.launch import microbenchmark
from tools.launch.errors import LaunchError
from tools.launch.experiment.bench_gpu import run
from tools.launch.experiment.bench_gpu.measured import (
    GAPS,
    TRACE,
    MeasureError,
    UnfinishedError,
    measured,
)
from tools.launch.experiment.bench_gpu.plan import SETTINGS, BenchSetting, PlannedRun, chosen, steps
from tools.launch.experiment.bench_gpu.run import Bench, _run_all, bench_gpu
from tools.records.gpu_bench import read_bench, write_bench
from tools.spec.run import DeviceKind

PUBLISHED, TUNED = chosen("published tuned")
QUIET = Console(file=io.StringIO())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    yield from machine_with(monkeypatch)


@pytest.fixture
def one_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    yield from machine_with(monkeypatch, FakeGpu())


def made(folder: Path, count: int, setting: BenchSetting) -> Path:
    record = run_record("r", dtype=setting.dtype)
    return write_run(folder, record, log_text([400.0 + n for n in range(count)]))


def test_without_a_gpu_it_is_refused_in_a_sentence_and_nothing_is_written(
    no_gpu: FakeNvml, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match="none is visible here; DRY_RUN=1 shows"):
        bench_gpu(tmp_path, False, QUIET, {})
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_without_a_gpu(
    no_gpu: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_gpu(tmp_path, True, QUIET, {"ONLY": "tuned"}) == 0
    printed = capsys.readouterr().out
    assert "tuned 2/2" in printed
    assert "published 1/2" not in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"ONLY": "x"}, "no setting 'x'"),
        ({"BUDGET": "x"}, "BUDGET=x"),
        ({"MICRO_BATCH": "8"}, "MICRO_BATCH= is the settings' own"),
        ({"RUNTIME": "docker"}, "RUNTIME=host, not docker"),
    ],
)
def test_wrong_variables_are_refused(
    environment: Mapping[str, str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match=reason):
        bench_gpu(tmp_path, True, QUIET, environment)


def test_a_torch_that_is_too_old_is_refused(
    one_h200: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "torch_problem", lambda: "torch 2.8 is too old.")
    with pytest.raises(LaunchError, match="is too old"):
        bench_gpu(tmp_path, False, QUIET, {})
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_kept_with_the_iterations_after_the_warm_up(tmp_path: Path) -> None:
    setting = chosen("bf16")[0]
    found = measured(made(tmp_path, 40, setting), setting, 61.0)
    assert found.iteration_ms == tuple(400.0 + n for n in range(12, 32))
    assert len(found.losses) == 20
    assert (found.wall_seconds, found.groups_ms) == (61.0, {})


def test_a_run_that_is_too_short_is_no_result(tmp_path: Path) -> None:
    setting = chosen("bf16")[0]
    with pytest.raises(MeasureError, match="has 15 of 20 timed iterations"):
        measured(made(tmp_path / "a", 27, setting), setting, 1.0)


@pytest.mark.parametrize("trace", [None, b"", gzip.compress(b'{"traceEvents": []}')[:-9]])
def test_a_trace_that_cannot_be_read_is_a_note_and_the_times_count(
    trace: bytes | None, tmp_path: Path
) -> None:
    folder = made(tmp_path, PUBLISHED.iterations, PUBLISHED)
    if trace is not None:
        (folder / TRACE).parent.mkdir()
        (folder / TRACE).write_bytes(trace)
    found = measured(folder, PUBLISHED, 1.0)
    assert (len(found.iteration_ms), found.groups_ms) == (50, {})
    assert found.note.startswith("the profiler's trace cannot be read: ")


def test_on_a_gpu_a_trace_of_the_host_alone_is_no_split(tmp_path: Path) -> None:
    record = run_record("r", device=DeviceKind.GPU, dtype=PUBLISHED.dtype)
    log = log_text([400.0 + n for n in range(PUBLISHED.iterations)])
    folder = write_run(tmp_path, record, log)
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9}
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 5}
    (folder / TRACE).parent.mkdir()
    (folder / TRACE).write_bytes(
        gzip.compress(json.dumps({"traceEvents": [step, operator]}).encode())
    )
    found = measured(folder, PUBLISHED, 1.0)
    assert (found.groups_ms, len(found.iteration_ms)) == ({}, 50)
    assert "saw nothing of the GPU" in found.note


def bench_of(folder: Path, budget: float = 1e6) -> Bench:
    return Bench(folder, budget, QUIET, bench())


def test_every_result_is_written_as_soon_as_it_is_there(tmp_path: Path) -> None:
    planned = steps(chosen("bf16 published+norm"))
    seen: list[int] = []

    def train(step: PlannedRun, folder: Path, data: Mapping[str, str], seconds: float) -> Path:
        before = read_bench(tmp_path)
        seen.append(len(before.settings) if before else 0)
        return made(folder, 40, step.setting)

    assert _run_all(bench_of(tmp_path), planned, {}, train) is False
    written = read_bench(tmp_path)
    assert written is not None
    assert seen == [0, 1]
    assert [(s.name, len(s.runs)) for s in written.settings] == [("published+norm", 1), ("bf16", 1)]


def test_a_run_that_fails_is_reported_and_the_others_are_made(tmp_path: Path) -> None:
    def train(step: PlannedRun, folder: Path, data: Mapping[str, str], seconds: float) -> Path:
        if step.setting.name == "bf16":
            raise MeasureError("it fell over")
        return made(folder, 40, step.setting)

    assert _run_all(bench_of(tmp_path), steps(chosen("bf16 published+norm")), {}, train) is True
    written = read_bench(tmp_path)
    assert written is not None
    reasons = {setting.name: setting.reason for setting in written.settings}
    assert reasons == {"published+norm": "", "bf16": "it fell over"}


def test_a_setting_that_failed_is_not_repeated_in_the_same_call(tmp_path: Path) -> None:
    tried: list[str] = []

    def train(step: PlannedRun, folder: Path, data: Mapping[str, str], seconds: float) -> Path:
        tried.append(step.title)
        raise MeasureError("it fell over")

    assert _run_all(bench_of(tmp_path), steps(chosen("tuned bf16")), {}, train) is True
    assert tried == ["tuned 1/2", "bf16 1/1"]


def test_iterations_that_were_timed_before_a_run_fell_over_count_with_a_note(
    tmp_path: Path,
) -> None:
    def train(step: PlannedRun, folder: Path, data: Mapping[str, str], seconds: float) -> Path:
        count = 40 if step.setting.name == "bf16" else 20
        raise UnfinishedError(made(folder, count, step.setting), "the profiler fell over")

    planned = steps(chosen("bf16 published+norm"))
    assert _run_all(bench_of(tmp_path), planned, {}, train) is True
    written = read_bench(tmp_path)
    assert written is not None
    norm, bf16 = written.settings
    assert (norm.runs, norm.reason) == ((), "the profiler fell over")
    assert [run.note for run in bf16.runs] == ["the profiler fell over"]
    assert len(bf16.runs[0].iteration_ms) == 20


def test_without_ceilings_the_runs_are_still_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: object, **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess((), 1, "", "RuntimeError: CUDA error: out of memory")

    monkeypatch.setattr(microbenchmark.subprocess, "run", fail)
    console = Console(file=io.StringIO())
    assert run._ceilings(console) is None
    assert "not known: RuntimeError: CUDA error: out of memory" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_no_time_is_left_for_is_recorded_as_left_out(tmp_path: Path) -> None:
    def train(step: PlannedRun, folder: Path, data: Mapping[str, str], seconds: float) -> Path:
        raise AssertionError("there was no time")

    assert _run_all(bench_of(tmp_path, 1.0), steps(SETTINGS), {}, train) is False
    written = read_bench(tmp_path)
    assert written is not None
    assert {setting.reason for setting in written.settings} == {"no time was left for it"}
    assert len(written.settings) == len(SETTINGS)


def test_other_conditions_begin_anew_and_equal_ones_resume(
    one_h200: FakeNvml, tmp_path: Path
) -> None:
    fresh = run._begin(tmp_path)
    assert fresh.device == "NVIDIA H200"
    assert fresh.model_flops_per_iteration == pytest.approx(1.6109e14, rel=1e-4)
    measured_before = replace(fresh, created_utc="before")
    write_bench(tmp_path, measured_before)
    assert run._begin(tmp_path).created_utc == "before"
    write_bench(tmp_path, replace(measured_before, driver="another"))
    assert run._begin(tmp_path).created_utc != "before"


SLOW_TRAINING = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit(143)))
print("started", flush=True)
time.sleep(60)
"""


def test_a_run_over_its_time_is_asked_to_end_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ended"
    command = (sys.executable, "-c", SLOW_TRAINING, str(marker))
    real = subprocess.Popen
    monkeypatch.setattr(run.subprocess, "Popen", lambda _, **kwargs: real(command, **kwargs))
    (step,) = steps(chosen("bf16"))
    with pytest.raises(MeasureError, match="was not done in 1 s"):
        run._train(step, tmp_path / "runs", {}, 1.0)
    assert marker.exists()


def test_a_run_that_is_refused_reports_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", "import sys; print('no room'); sys.exit(2)")
    real = subprocess.Popen
    monkeypatch.setattr(run.subprocess, "Popen", lambda _, **kwargs: real(command, **kwargs))
    (step,) = steps(chosen("bf16"))
    with pytest.raises(MeasureError, match="failed: no room"):
        run._train(step, tmp_path / "runs", {}, 30.0)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("setting", [PUBLISHED, TUNED], ids=lambda setting: setting.name)
def test_the_main_settings_train_and_are_measured_on_a_small_model_here(
    setting: BenchSetting, tmp_path: Path, sample_prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TARGET", "train-baseline-gpt2-tiny-1cpu")
    monkeypatch.setenv("SHARED_START", "0")
    folder = run._train(PlannedRun(setting, 1, 60.0), tmp_path, {"DATA": str(sample_prefix)}, 180.0)
    found = measured(folder, setting, 60.0)
    assert (len(found.iteration_ms), len(found.losses), found.note) == (50, 50, "")
    assert found.losses[-1] < found.losses[0]
    assert {"GEMM", "cross entropy", "GELU and bias", "optimizer", GAPS} <= set(found.groups_ms)
