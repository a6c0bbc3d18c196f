import gzip
import io
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from tests.given import run as make
from tests.launch.fake_nvml import FakeGpu, FakeNvml, machine_with
from tests.report.factory import log_text, run_record, write_run
from tests.study.bench_gpu.results import bench
from tools.launch import microbenchmark
from tools.launch.compose import Launch
from tools.launch.options import Options
from tools.records.gpu_bench import GpuBench, read_bench, write_bench
from tools.records.io import write_record
from tools.records.run import STATUS_FILE, Status, StatusRecord
from tools.spec.errors import LaunchError
from tools.spec.run import DeviceKind
from tools.study import cells, runner
from tools.study.bench_gpu import plan, run
from tools.study.bench_gpu.measured import GAPS, TRACE, MeasureError, measured
from tools.study.bench_gpu.plan import SETTINGS, BenchSetting, chosen
from tools.study.bench_gpu.run import Bench

OK = StatusRecord(Status.OK, 0)
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
    made_now = write_run(folder, record, log_text([400.0 + n for n in range(count)]))
    write_record(made_now / STATUS_FILE, StatusRecord(Status.OK, 0, wall_seconds=61.0))
    return made_now


def test_without_a_gpu_it_is_refused_in_a_sentence_and_nothing_is_written(
    no_gpu: FakeNvml, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match="none is visible here; DRY_RUN=1 shows"):
        make("bench-gpu", {"RUNS": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_without_a_gpu(
    no_gpu: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make("bench-gpu", {"RUNS": str(tmp_path), "DRY_RUN": "1", "ONLY": "tuned"}) == 0
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
    with pytest.raises(ValueError, match=reason):
        make("bench-gpu", {"RUNS": str(tmp_path), "DRY_RUN": "1", **environment})


def test_a_torch_that_is_too_old_is_refused(
    one_h200: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "torch_problem", lambda: "torch 2.8 is too old.")
    with pytest.raises(LaunchError, match="is too old"):
        make("bench-gpu", {"RUNS": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_kept_with_the_iterations_after_the_warm_up(tmp_path: Path) -> None:
    setting = chosen("bf16")[0]
    found = measured(made(tmp_path, 40, setting), setting)
    assert found.iteration_ms == tuple(400.0 + n for n in range(12, 32))
    assert len(found.losses) == 20
    assert (found.wall_seconds, found.groups_ms) == (61.0, {})


def test_a_run_that_is_too_short_is_no_result(tmp_path: Path) -> None:
    setting = chosen("bf16")[0]
    with pytest.raises(MeasureError, match="has 15 of 20 timed iterations"):
        measured(made(tmp_path / "a", 27, setting), setting)


@pytest.mark.parametrize("trace", [None, b"", gzip.compress(b'{"traceEvents": []}')[:-9]])
def test_a_trace_that_cannot_be_read_is_a_note_and_the_times_count(
    trace: bytes | None, tmp_path: Path
) -> None:
    folder = made(tmp_path, PUBLISHED.iterations, PUBLISHED)
    if trace is not None:
        (folder / TRACE).parent.mkdir()
        (folder / TRACE).write_bytes(trace)
    found = measured(folder, PUBLISHED)
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
    found = measured(folder, PUBLISHED)
    assert (found.groups_ms, len(found.iteration_ms)) == ({}, 50)
    assert "saw nothing of the GPU" in found.note


Train = Callable[[Launch, Path], tuple[Path, StatusRecord]]


def train_all(
    names: str, runs: Path, train: Train, monkeypatch: pytest.MonkeyPatch, budget: float = 1e6
) -> tuple[bool, GpuBench]:
    """Bench these settings with a stand-in for training; whether all ended well, and what is kept."""

    def execute(launch: Launch, folder: Path, *_: object) -> tuple[Path, StatusRecord]:
        return train(launch, folder)

    monkeypatch.setattr(runner, "execute", execute)
    monkeypatch.setattr(cells, "check", lambda *_, **__: None)
    monkeypatch.setattr(cells, "ensure_data", lambda *_: None)
    before = read_bench(runs) or bench()
    call = Bench(runs, chosen(names), QUIET, before)
    ended_well = call.train(Options(data="owt-ds/any"), budget)
    return ended_well, read_bench(runs) or before


def setting_of(launch: Launch, folder: Path) -> BenchSetting:
    (setting,) = chosen(folder.name)
    assert launch.iterations == setting.iterations
    return setting


def good(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
    setting = setting_of(launch, folder)
    made_before = len(list(folder.glob("*")))
    return made(folder / f"run{made_before}", setting.iterations, setting), OK


def test_every_result_is_written_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def train(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
        before = read_bench(tmp_path)
        seen.append(len(before.settings) if before else 0)
        return good(launch, folder)

    ended_well, written = train_all("bf16 published+norm", tmp_path, train, monkeypatch)
    assert ended_well
    assert seen == [0, 1]
    assert [(s.name, len(s.runs)) for s in written.settings] == [("published+norm", 1), ("bf16", 1)]


def test_a_second_call_makes_what_the_first_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
        trained.append(folder.name)
        return good(launch, folder)

    train_all("tuned", tmp_path, train, monkeypatch)
    _, written = train_all("tuned bf16", tmp_path, train, monkeypatch)
    assert trained == ["tuned", "tuned", "bf16"]
    assert [(s.name, len(s.runs)) for s in written.settings] == [("tuned", 2), ("bf16", 1)]


def test_a_run_that_fails_is_named_and_the_others_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
        if folder.name == "bf16":
            raise LaunchError("it fell over")
        return good(launch, folder)

    ended_well, written = train_all("bf16 published+norm", tmp_path, train, monkeypatch)
    assert not ended_well
    reasons = {setting.name: setting.reason for setting in written.settings}
    assert reasons == {"published+norm": "", "bf16": "it fell over"}


def test_a_setting_that_failed_is_tried_again_but_not_in_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def train(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
        tried.append(folder.name)
        raise LaunchError("it fell over")

    assert not train_all("tuned bf16", tmp_path, train, monkeypatch)[0]
    assert tried == ["tuned", "bf16"]
    assert not train_all("tuned bf16", tmp_path, train, monkeypatch)[0]
    assert tried == ["tuned", "bf16", "tuned", "bf16"]


def test_iterations_that_were_timed_before_a_run_fell_over_count_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fell_over = StatusRecord(Status.CRASHED, 1, "The profiler fell over.")

    def train(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
        setting = setting_of(launch, folder)
        return made(folder / "r", 40 if setting.name == "bf16" else 20, setting), fell_over

    ended_well, written = train_all("bf16 published+norm", tmp_path, train, monkeypatch)
    assert not ended_well
    norm, bf16 = written.settings
    assert (norm.runs, norm.reason) == ((), "crashed: The profiler fell over.")
    assert [run.note for run in bf16.runs] == ["crashed: The profiler fell over."]
    assert len(bf16.runs[0].iteration_ms) == 20


def test_a_setting_that_cannot_work_here_is_recorded_with_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(launch: Launch, **_: bool) -> None:
        if "norm" in launch.environment.get("KIT_FUSED", ""):
            raise LaunchError("FUSED=norm needs another GPU.")

    monkeypatch.setattr(cells, "check", check)
    monkeypatch.setattr(runner, "execute", lambda launch, folder, *_: good(launch, folder))
    monkeypatch.setattr(cells, "ensure_data", lambda *_: None)
    call = Bench(tmp_path, chosen("bf16 published+norm"), QUIET, bench())
    assert not call.train(Options(data="owt-ds/any"), 1e6)
    reasons = {setting.name: setting.reason for setting in call.result.settings}
    assert reasons == {"published+norm": "FUSED=norm needs another GPU.", "bf16": ""}


def test_without_ceilings_the_runs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: object, **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess((), 1, "", "RuntimeError: CUDA error: out of memory")

    monkeypatch.setattr(microbenchmark.subprocess, "run", fail)
    console = Console(file=io.StringIO())
    assert run._ceilings(console) is None
    assert "not known: RuntimeError: CUDA error: out of memory" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_no_time_is_left_for_is_recorded_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
        raise AssertionError("there was no time")

    ended_well, written = train_all("", tmp_path, train, monkeypatch, budget=1.0)
    assert ended_well
    assert {setting.reason for setting in written.settings} == {"no time was left for it"}
    assert len(written.settings) == len(SETTINGS)


def test_each_run_gets_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    times = chain([0.0], repeat(10.0))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(times)))

    def train(launch: Launch, folder: Path) -> tuple[Path, StatusRecord]:
        limits.append(launch.time_limit_seconds)
        return good(launch, folder)

    train_all("bf16", tmp_path, train, monkeypatch, budget=500.0)
    assert limits == [490.0]


def test_other_conditions_begin_anew_and_equal_ones_go_on(
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


@pytest.mark.slow
def test_the_main_settings_train_and_are_measured_on_a_small_model_here(
    tmp_path: Path, sample_prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "TARGET", "train-baseline-gpt2-tiny-1cpu")
    call = Bench(tmp_path, (PUBLISHED, TUNED), QUIET, bench())
    once = tuple(msgspec.structs.replace(setting, repeats=1) for setting in call.settings)
    call = replace(call, settings=once)
    assert call.train(Options(data=str(sample_prefix), shared_start=False), 3600.0)
    assert [setting.name for setting in call.result.settings] == ["published", "tuned"]
    for setting in call.result.settings:
        (found,) = setting.runs
        assert (len(found.iteration_ms), len(found.losses), found.note) == (50, 50, "")
        assert found.losses[-1] < found.losses[0]
        assert {"GEMM", "cross entropy", "GELU and bias", "optimizer", GAPS} <= set(found.groups_ms)
