import io
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, count, pairwise, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_patches.fusions import NAMES
from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import LOG_FILE, STATUS_FILE, Status, StatusRecord
from parakit.config.errors import LaunchError
from parakit.config.model import load_model
from parakit.config.run import DeviceKind
from parakit.data import open_dataset
from parakit.experiments import engine, runner
from parakit.experiments.definition import Cell, Experiment
from parakit.experiments.engine import run_experiment
from parakit.experiments.runner import NO_TIME, order_repeats
from parakit.launch import microbenchmark
from parakit.launch.compose import Launch
from parakit.launch.options import Options
from parakit.launch.run_folder import create_run_folder
from parakit.launch.runtime import ON_HOST
from parakit.launch.train import compose_job
from parakit.logs.traces import GAPS
from tests.bench import gpu as bench_gpu
from tests.bench.gpu import OUTPUT, describe, fitting, settings
from tests.bench.gpu_runs import FOLDER, WARM_UP, Bench, read_bench
from tests.given import run as make
from tests.launch.fake_nvml import FakeGpu, FakeNvml, machine_with
from tests.launch.megatron_parser import MegatronParser
from tests.reporting.factory import log_text

BUDGET_SECONDS = 510.0


ANY = Options(data="owt-ds/any")


def chosen(names: str = "", options: Options = ANY) -> tuple[Cell, ...]:
    return settings(names, options).cells


PUBLISHED, TUNED = chosen("published tuned")
ALL = chosen()
ALONE = [cell for cell in ALL if cell.label.startswith("published+")]


def fused(cell: Cell) -> set[str]:
    return set(cell.job.options.fused)


def extra(cell: Cell) -> tuple[str, ...]:
    return cell.job.options.extra


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    yield from machine_with(monkeypatch)


@pytest.fixture
def one_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    yield from machine_with(monkeypatch, FakeGpu())


def test_the_published_setting_is_fp16_without_a_patch_and_profiled_after_the_timed_part() -> None:
    flags = extra(PUBLISHED)
    start = int(flags[flags.index("--profile-step-start") + 1])
    end = int(flags[flags.index("--profile-step-end") + 1])
    assert WARM_UP + 50 < start < end < (PUBLISHED.job.options.iterations or 0)
    assert "--bf16" not in flags
    assert not fused(PUBLISHED)


def test_the_tuned_setting_is_bf16_with_patches_that_exist() -> None:
    assert "--bf16" in extra(TUNED)
    assert fused(TUNED) <= set(NAMES)


def test_every_patch_has_a_single_run_with_only_this_patch() -> None:
    assert sorted(name for cell in ALONE for name in fused(cell)) == sorted(NAMES)
    assert all("--bf16" not in extra(cell) for cell in ALONE)
    assert all(cell.why == f"the patch {cell.job.options.fused[0]} alone" for cell in ALONE)


def turns() -> list[str]:
    return [f"{cell.label} {number}/{cell.repeats}" for number, cell in order_repeats(ALL)]


def test_repeats_of_main_settings_come_first_in_alternation() -> None:
    assert turns()[:5] == [
        *("published 1/2", "tuned 1/2", "published 2/2", "tuned 2/2"),
        f"{ALONE[0].label} 1/1",
    ]


def test_runs_beyond_the_time_budget_are_left_out_by_name() -> None:
    planned = order_repeats(ALL)
    kept, left_out = fitting(planned, BUDGET_SECONDS)
    assert set(kept) | set(left_out) == set(planned)
    assert sum(cell.expected_seconds for _, cell in kept) <= BUDGET_SECONDS
    assert left_out
    text = describe(ALL, BUDGET_SECONDS, "my data")
    assert all(title in text for title in turns())
    assert "DATA='my data' make train-baseline-gpt2-large-1gpu" in text


def test_train_command_names_the_patches_and_disables_the_communication_log() -> None:
    told = chosen("tuned", Options(runs=Path("r")))[0].job.variables
    assert (told["RUNTIME"], told["LEDGER"]) == ("host", "0")
    assert told["RUNS"].endswith(f"r/{FOLDER}/tuned")
    assert "FUSED" not in PUBLISHED.job.variables


def test_megatron_knows_every_flag_of_every_setting(megatron_parser: MegatronParser) -> None:
    for cell in ALL:
        unknown, known = megatron_parser.known(compose_job(cell.job, ON_HOST).arguments())
        assert unknown == []
        is_bf16 = "--bf16" in extra(cell)
        assert (known["fp16"], known["bf16"]) == (not is_bf16, is_bf16)
        assert known["gradient_accumulation_fusion"] == ("gradient_gemm" in fused(cell))
        assert known["eval_iters"] == 0
        assert (
            "--profile" not in extra(cell)
            or known["profile_step_end"] < cell.job.options.iterations
        )


def test_each_split_of_the_sample_holds_sequences_of_the_models_length(sample_prefix: Path) -> None:
    lengths, flags = open_dataset(sample_prefix).lengths, extra(PUBLISHED)
    parts = [float(part) for part in flags[flags.index("--split") + 1].split(",")]
    ends = [round(len(lengths) * sum(parts[: n + 1]) / sum(parts)) for n in range(len(parts))]
    for start, end in pairwise([0, *ends]):
        assert lengths[start:end].sum() > 4 * load_model("gpt2-large").shape.seq_length


def test_patches_can_be_removed_from_or_added_to_the_tuned_setting_by_name() -> None:
    for name in NAMES:
        if name in fused(TUNED):
            (other,) = chosen(f"tuned-{name}")
            assert fused(TUNED) - fused(other) == {name}
        else:
            (other,) = chosen(f"tuned+{name}")
            assert fused(other) - fused(TUNED) == {name}
        assert set(extra(other)) < set(extra(TUNED))
        assert other.label not in {cell.label for cell in ALL}


def test_cuda_graphs_are_measured_in_addition_to_tuned() -> None:
    (graphs,) = chosen("tuned+cuda-graph")
    assert fused(graphs) == fused(TUNED)
    assert extra(graphs)[-2:] == ("--cuda-graph-impl", "full_iteration")
    assert WARM_UP > 3  # Megatron captures after three iterations.


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no setting 'fast'; it knows published, tuned, "):
        chosen("published fast")


def test_bench_without_a_gpu_is_refused_and_writes_nothing(
    no_gpu: FakeNvml, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match="none is visible here; DRY_RUN=1 shows"):
        make("bench NAME=gpu", {"RUNS": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_without_a_gpu(
    no_gpu: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        make("bench NAME=gpu", {"RUNS": str(tmp_path), "DRY_RUN": "1", "ARGS": "--only tuned"}) == 0
    )
    printed = capsys.readouterr().out
    assert "tuned 2/2" in printed
    assert "published 1/2" not in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"ARGS": "--only x"}, "no setting 'x'"),
        ({"ARGS": "--budget x"}, "--budget: x is not a number above 0"),
        ({"MICRO_BATCH": "8"}, "MICRO_BATCH= is the settings' own"),
        ({"RUNTIME": "docker"}, "RUNTIME=host, not docker"),
    ],
)
def test_wrong_variables_are_refused(
    environment: Mapping[str, str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        make("bench NAME=gpu", {"RUNS": str(tmp_path), "DRY_RUN": "1", **environment})


def test_a_torch_that_is_too_old_is_refused(
    one_h200: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "torch_problem", lambda: "torch 2.8 is too old.")
    with pytest.raises(LaunchError, match="is too old"):
        make("bench NAME=gpu", {"RUNS": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


Train = Callable[[Launch], tuple[Path, StatusRecord]]


class Machine:
    """Fake machine: each run writes a folder with a log and ends with the status that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runs: Path, data: Path) -> None:
        self.options = Options(data=str(data), runs=runs)
        self.trained: list[str] = []
        self.refused = ""
        self.ends: dict[str, tuple[int, StatusRecord]] = {}
        self.limits: list[float | None] = []
        self.printed = ""
        monkeypatch.setattr(runner, "execute_launch", self._execute)
        monkeypatch.setattr(runner, "ensure_initial_checkpoint", lambda *_: None)
        monkeypatch.setattr(engine, "check_launch", self._check)
        monkeypatch.setattr(engine, "make_sample", lambda *_: None)
        seconds = (
            count()
        )  # Each folder needs another time, because folders are named by the second.
        monkeypatch.setattr(records, "utc_stamp", lambda: f"20260101T{next(seconds):06}Z")

    def _check(self, launch: Launch, **_: bool) -> None:
        if "attention_flash" in launch.spec.fused:
            raise LaunchError("FUSED=attention_flash needs another GPU.")

    def _execute(self, launch: Launch, folder: Path, *_: object) -> tuple[Path, StatusRecord]:
        self.trained.append(folder.name)
        self.limits.append(launch.time_limit_seconds)
        if folder.name == self.refused:
            raise LaunchError("it fell over")
        usual = launch.iterations, StatusRecord(Status.OK, 0)
        length, status = self.ends.get(folder.name, usual)
        made = create_run_folder(launch, folder)
        (made / LOG_FILE).write_text(log_text([400.0 + n % 3 for n in range(length)]))
        write_record(made / STATUS_FILE, status)
        return made, status

    def bench(self, names: str, budget: float = 1e6) -> tuple[int, Bench]:
        asked = settings(names, self.options)
        console = Console(file=io.StringIO(), width=1000)
        code = run_experiment(replace(asked, budget_seconds=budget), OUTPUT, console)
        self.printed = console.file.getvalue()  # type: ignore[attr-defined]
        return code, read_bench(self.options.runs) or Bench(())


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sample_prefix: Path, one_h200: FakeNvml
) -> Machine:
    return Machine(monkeypatch, tmp_path, sample_prefix)


def test_measurements_are_read_from_run_folders(machine: Machine) -> None:
    code, bench = machine.bench("bf16 published+norm")
    assert (code, machine.trained) == (0, ["published+norm", "bf16"])
    assert [(row.name, row.dtype, row.fused) for row in bench.rows] == [
        ("published+norm", "fp16", ("norm",)),
        ("bf16", "bf16", ()),
    ]
    assert "published+norm  fp16  norm  401.0  401.0  ×0.916" in machine.printed


def test_second_call_trains_the_runs_that_the_first_left_out(machine: Machine) -> None:
    machine.bench("bf16")
    machine.bench("bf16 published+norm")
    assert machine.trained == ["bf16", "published+norm"]


def test_failed_run_is_named_and_retried_while_other_runs_are_trained(
    machine: Machine,
) -> None:
    machine.refused = "tuned"
    assert machine.bench("bf16 tuned")[0] == 1
    assert machine.trained == ["tuned", "bf16"]
    assert "it fell over" in machine.printed
    machine.trained.clear()
    assert machine.bench("bf16 tuned")[0] == 1
    assert machine.trained == ["tuned"]


def test_timed_iterations_of_a_crashed_run_count_with_a_note(
    machine: Machine,
) -> None:
    fell_over = StatusRecord(Status.CRASHED, 1, "The profiler fell over.")
    machine.ends = {"bf16": (32, fell_over), "published+norm": (20, fell_over)}
    code, bench = machine.bench("bf16 published+norm")
    assert code == 1
    norm, bf16 = bench.rows
    assert norm.entry is None
    assert bf16.entry is not None
    assert norm.note == bf16.note == "crashed: The profiler fell over."


def test_setting_that_the_device_cannot_run_is_listed_with_the_rule(machine: Machine) -> None:
    assert machine.bench("bf16 published+attention_flash")[0] == 1
    assert machine.trained == ["bf16"]
    assert machine.printed.count("FUSED=attention_flash needs another GPU.") == 2


def test_runs_are_left_out_once_no_time_remains(machine: Machine) -> None:
    code, _ = machine.bench("bf16 tuned", budget=1.0)
    assert (code, machine.trained) == (0, [])
    assert (
        machine.printed.count(NO_TIME) == 5
    )  # The reason is printed for each skipped run and in the table.


def test_each_run_is_limited_to_the_remaining_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = chain([0.0, 0.0], repeat(10.0))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(times)))
    machine.bench("bf16", budget=500.0)
    assert machine.limits == [490.0]


def test_runs_continue_if_ceilings_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: object, **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess((), 1, "", "RuntimeError: CUDA error: out of memory")

    monkeypatch.setattr(microbenchmark.subprocess, "run", fail)
    console = Console(file=io.StringIO())
    assert bench_gpu._ceilings(console) is None
    assert "not known: RuntimeError: CUDA error: out of memory" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_main_settings_train_and_are_measured_on_a_small_model(
    tmp_path: Path, sample_prefix: Path
) -> None:
    def small(cell: Cell) -> Cell:
        options = replace(cell.job.options, data=str(sample_prefix), shared_start=False)
        job = replace(cell.job, model=load_model("gpt2-tiny"), device=DeviceKind.CPU)
        return replace(cell, job=job.with_options(options), repeats=1)

    asked = settings("published tuned", Options(runs=tmp_path))
    experiment: Experiment = replace(asked, cells=tuple(map(small, asked.cells)))
    assert run_experiment(experiment, OUTPUT, Console(file=io.StringIO())) == 0
    bench = read_bench(tmp_path)
    assert bench is not None
    for row in bench.rows:
        assert row.entry is not None
        window = row.entry.run.window
        assert (len(window.samples_ms), row.note) == (50, "")
        losses = row.entry.losses
        assert losses[window.iterations[-1]] < losses[window.iterations[0]]
        assert {"GEMM", "cross entropy", "GELU and bias", "optimizer", GAPS} <= set(row.kernels_ms)
