import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.config.errors import LaunchError
from parakit.experiments import runner as module
from parakit.experiments.engine import run_experiment
from parakit.experiments.tables.sweep import OUTPUT
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.job import parse_target
from parakit.launch.options import Options, Saving, Wandb, options_from_texts
from parakit.launch.resume import compose_resumed_launch
from parakit.launch.run_folder import create_run_folder
from parakit.launch.supervise.interruption import Interrupted
from parakit.launch.train import compose_job
from tests.given import swept as sweep_of

LINE = (
    " [2026-01-01 00:00:00.000000] iteration {n:8d}/     500 | consumed samples: {n:12d} |"
    " elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000000E-03 |"
    " global batch size:     4 | lm loss: 9.000000E+00 | loss scale: 1.0 | grad norm: 1.000 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


class Machine:
    """Fake training: runs write a folder and a log, and end with the status that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[str] = []
        self.ends: dict[str, Status] = {}
        self.interrupts_at: str = ""
        monkeypatch.setattr(module, "execute_launch", self._execute)
        monkeypatch.setattr(module, "ensure_initial_checkpoint", lambda *_: None)
        monkeypatch.setattr("parakit.launch.run_folder.read_kit_commit", lambda: None)

    def _execute(self, launch: Launch, runs: Path, *_: object) -> tuple[Path, StatusRecord]:
        name = f"{launch.spec.backend} {launch.spec.name}"
        if name == self.interrupts_at:
            raise Interrupted
        self.trained.append(name)
        folder = create_run_folder(launch, runs)
        lines = (LINE.format(n=n, ms=100 + 0.1 * (n % 3)) for n in range(1, 26))
        (folder / records.LOG_FILE).write_text("".join(lines))
        status = StatusRecord(self.ends.get(name, Status.OK), 0, "Why.")
        write_record(folder / records.STATUS_FILE, status)
        return folder, status


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def options(sample_prefix: Path, tmp_path: Path) -> Options:
    return Options(data=str(sample_prefix), runs=tmp_path / "runs")


ALL = ["megatron baseline", "native baseline", "megatron dp2", "native dp2"]
ALL_MEGATRON = ["megatron baseline", "megatron dp2"]


TINY = {"MODELS": "gpt2-tiny"}
MEGATRON = {**TINY, "BACKENDS": "megatron"}


def swept(options: Options, axes: Mapping[str, str] = TINY) -> tuple[int, str]:
    text, reports = io.StringIO(), options.runs.parent / "reports"
    experiment = sweep_of(axes, options)
    code = run_experiment(experiment, OUTPUT, Console(file=text, width=400), reports)
    return code, text.getvalue()


@pytest.mark.usefixtures("laid_out_charts")
def test_legal_cells_are_trained_and_the_others_skipped_with_the_rule(
    machine: Machine, options: Options
) -> None:
    code, text = swept(options)
    assert (code, machine.trained) == (0, ALL)
    skipped = "2 cells skipped (megatron dp2 gpt2-tiny 1cpu, native dp2 gpt2-tiny 1cpu)"
    assert f"{skipped}: Strategy 'dp2' needs 2 devices" in text
    folder = options.runs.parent / "reports" / "sweep"
    assert {path.name for path in folder.iterdir()} == {
        *("cells.json", "sweep.md", "sweep.json", "sweep.svg")
    }
    assert "native is within noise of megatron" in (folder / "sweep.md").read_text()
    (first, *_) = json.loads((folder / "sweep.json").read_text())
    assert first["iteration_ms_median"] == pytest.approx(100.1)


def test_finished_cells_are_reused_and_only_failed_cells_are_retried(
    machine: Machine, options: Options
) -> None:
    machine.ends["native baseline"] = Status.CRASHED
    code, text = swept(options)
    assert (code, machine.trained) == (1, ALL)
    assert "crashed: Why." in text
    machine.trained.clear()
    machine.ends.clear()
    code, text = swept(options)
    assert (code, machine.trained) == (0, ["native baseline"])
    assert text.count("made before") == 3


def test_ctrl_c_keeps_finished_cells_and_the_next_call_continues(
    machine: Machine, options: Options
) -> None:
    machine.interrupts_at = "megatron dp2"
    with pytest.raises(Interrupted):
        swept(options, MEGATRON)
    text = (options.runs.parent / "reports" / "sweep" / "sweep.md").read_text()
    assert "1 of 2 cells are not complete" in text
    machine.interrupts_at = ""
    code, _ = swept(options, MEGATRON)
    assert (code, machine.trained) == (0, ALL_MEGATRON)


def test_repeats_have_separate_folders_and_existing_ones_count(
    machine: Machine, options: Options
) -> None:
    swept(options, MEGATRON)
    machine.trained.clear()
    swept(replace(options, repeats=3), MEGATRON)
    assert machine.trained == ALL_MEGATRON * 2


def test_other_settings_are_other_runs(machine: Machine, options: Options) -> None:
    swept(options, MEGATRON)
    machine.trained.clear()
    swept(replace(options, iterations=30), MEGATRON)
    assert machine.trained == ALL_MEGATRON


def test_a_sweep_without_a_legal_cell_is_refused_before_anything_is_written(
    machine: Machine, options: Options
) -> None:
    with pytest.raises(LaunchError, match="No cell of this sweep can run here"):
        swept(options, {**TINY, "DEVICES": "3cpu"})
    assert not (options.runs.parent / "reports").exists()
    assert not options.runs.exists()


def test_a_dry_run_prints_the_cells_as_data(
    machine: Machine, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    assert swept(replace(options, dry_run=True))[0] == 0
    data = json.loads(capsys.readouterr().out)
    assert [cell["target"] for cell in data["cells"]][-1] == "train-dp2-gpt2-tiny-2cpu"
    assert len(data["skipped"]) == 4
    assert machine.trained == []


@pytest.mark.parametrize(
    "variables",
    [
        {"EXTRA": "--adam-eps 1e-7", "MICRO_BATCH": "2", "SEED": "7", "SHARED_START": "0"},
        {"SAVE_EVERY": "10", "KEEP": "3", "ASYNC_SAVE": "1", "HANG_TIMEOUT": "60", "WANDB": "1"},
        {"FUSED": "norm", "SHARE_GPU": "1", "LEDGER": "0", "NET": "1gbps", "ITERS": "7"},
    ],
)
def test_target_and_variables_of_a_cell_reproduce_its_run(
    options: Options, variables: dict[str, str]
) -> None:
    places = {"DATA": str(options.data), "RUNS": str(options.runs)}
    asked = options_from_texts({**places, **variables, "REPEATS": "3", "DRY_RUN": "1"})
    jobs = [cell.job for cell in sweep_of(MEGATRON, asked).cells]
    for job in (job for job in jobs if (job.strategy == "dp2") == (job.devices == 2)):
        job_options = options_from_texts(job.variables)
        assert compose_job(parse_target(job.target, job_options)) == compose_job(job)


def resume(folder: Path, changed: Options) -> None:
    """Add a further, successful attempt to the folder, as `make resume` does."""
    loaded = ResumePoint(folder.name, folder / records.CHECKPOINTS_FOLDER, 10)
    loaded.folder.mkdir(exist_ok=True)
    launch = compose_resumed_launch(records.read_run(folder), loaded, None, changed)
    create_run_folder(launch, folder.parent, folder)
    write_record(folder / records.STATUS_FILE, StatusRecord(Status.OK, 0, ""))


@pytest.mark.parametrize(
    ("changed", "again"),
    [({}, []), ({"iterations": 30}, ["dp2"]), ({"extra": ("--lr", "1e-5")}, ["dp2"])],
)
def test_resumed_run_counts_for_its_cell_unless_its_settings_changed(
    machine: Machine,
    options: Options,
    changed: dict[str, Any],
    again: list[str],
) -> None:
    wandb = Wandb(mode="offline")
    options = replace(options, saving=Saving(10), wandb=wandb)
    swept(options, MEGATRON)
    (folder,) = options.runs.glob("*-dp2-*")
    for _ in range(2):
        resume(folder, replace(options, **changed))
    machine.trained.clear()
    assert swept(options, MEGATRON)[0] == 0
    assert machine.trained == [f"megatron {strategy}" for strategy in again]


def test_run_resumed_on_another_machine_does_not_count_for_its_cell(
    machine: Machine, options: Options
) -> None:
    options = replace(options, saving=Saving(10))
    swept(options, MEGATRON)
    (folder,) = options.runs.glob("*-dp2-*")
    resume(folder, options)
    first = folder / records.ATTEMPTS_FOLDER / "1"
    there = records.read_run(first)
    elsewhere = replace(there, host=replace(there.host, cpu="Another"))
    records.write_run(first, elsewhere)
    machine.trained.clear()
    swept(options, MEGATRON)
    assert machine.trained == ["megatron dp2"]


def test_cells_have_no_dropout_by_default(options: Options) -> None:
    for sweep_options, dropout in ((options, 0), (replace(options, dropout=0.1), 0.1)):
        launch = compose_job(sweep_of(TINY, sweep_options).cells[0].job)
        assert launch.spec.dropout == dropout
