import io
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.config.errors import LaunchError
from parakit.config.run import RuntimeName
from parakit.config.strategy import PUBLISHED_STRATEGIES
from parakit.experiments import runner as runner_module
from parakit.experiments.commands import run_named_experiment
from parakit.experiments.load import load_experiment
from parakit.experiments.runner import find_finished_runs
from parakit.experiments.tables.published import announce_published
from parakit.launch import data as data_module
from parakit.launch import runtime as runtime_module
from parakit.launch.compose import Launch
from parakit.launch.options import Options
from parakit.launch.run_folder import create_run_folder
from parakit.launch.train import compose_job
from tests.launch.fake_nvml import FakeNvml


class Machine:
    """Fake training and reporting: runs write folders and end with the status that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[str] = []
        self.reported: list[list[str]] = []
        self.ends: dict[str, Status] = {}
        self.refused: set[str] = set()
        monkeypatch.setattr(runner_module, "execute_launch", self._execute)
        monkeypatch.setattr(data_module, "subprocess", SimpleNamespace(run=self._report))

    def _execute(self, launch: Launch, runs: Path, *_: object) -> tuple[Path, StatusRecord]:
        self.trained.append(launch.spec.name)
        if launch.spec.name in self.refused:
            raise LaunchError("The disk is full.")
        folder = create_run_folder(launch, runs)
        status = StatusRecord(self.ends.get(launch.spec.name, Status.OK), 0)
        write_record(folder / records.STATUS_FILE, status)
        return folder, status

    def _report(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.reported.append(list(command))
        return subprocess.CompletedProcess(command, 0)


@pytest.fixture
def machine(two_h200: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("parakit.launch.run_folder.read_kit_commit", lambda: None)
    monkeypatch.setattr(runtime_module, "can_import_transformer_engine", lambda: True)
    return Machine(monkeypatch)


@pytest.fixture
def options(sample_prefix: Path, tmp_path: Path) -> Options:
    return Options(
        runtime=RuntimeName.HOST,
        data=str(sample_prefix),
        runs=tmp_path / "runs",
        extra=("--split", "90,9,1"),
    )


def compose_six(options: Options) -> list[Launch]:
    published = load_experiment("published", options)
    return [compose_job(cell.job) for cell in published.cells]


def said(options: Options) -> tuple[int, str]:
    text = io.StringIO()
    code = run_named_experiment("published", options, Console(file=text, width=400))
    return code, text.getvalue()


def test_six_runs_are_trained_in_turn_and_then_reported(machine: Machine, options: Options) -> None:
    code, text = said(options)
    assert (code, machine.trained) == (0, list(PUBLISHED_STRATEGIES))
    (command,) = machine.reported
    assert command[1:4] == ["-m", "parakit", "report"]
    assert len([word for word in command if word.startswith(str(options.runs))]) == 6
    assert "All 6 runs ended well." in text


def test_iterations_disk_space_and_minutes_are_printed_first(
    machine: Machine, options: Options
) -> None:
    first = said(options)[1].splitlines()[0]
    assert "6 of the 6 published runs are to be made, 100 iterations each" in first
    minutes = re.search(r"about (\d+) minutes", first)
    assert minutes is not None
    assert (
        10 <= int(minutes[1]) <= 15
    )  # There are six starts, and 100 iterations of 3.3 s in total over the six runs.
    assert f"384 MiB in {options.runs}" in first


def test_failed_run_does_not_stop_other_runs_and_a_repetition_trains_only_the_failed_run(
    machine: Machine, options: Options
) -> None:
    machine.ends["tp2"] = Status.OUT_OF_MEMORY
    code, text = said(options)
    assert (code, machine.trained) == (1, list(PUBLISHED_STRATEGIES))
    assert "5 of 6 runs ended well; repeat 'make reproduce'" in text
    machine.trained.clear()
    machine.ends.clear()
    code, text = said(options)
    assert (code, machine.trained) == (0, ["tp2"])
    assert text.startswith("1 of the 6 published runs are to be made")
    assert text.count("made before") == 5


def test_other_runs_are_reported_if_a_run_cannot_be_written(
    machine: Machine, options: Options
) -> None:
    machine.refused = {"dp2"}
    code, text = said(options)
    assert code == 1
    assert "dp2: The disk is full." in text
    assert len([word for word in machine.reported[0] if word.startswith(str(options.runs))]) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"iterations": 50},
        {"seed": 7},
        {"micro_batch_size": 16, "global_batch_size": 64},
        {"extra": ("--split", "80,19,1")},
    ],
)
def test_only_an_identical_run_counts_as_finished(
    machine: Machine, options: Options, changes: dict[str, object]
) -> None:
    said(options)
    launches = compose_six(replace(options, iterations=100))
    assert all(find_finished_runs(launch) for launch in launches)
    changed_launches = compose_six(replace(options, **{"iterations": 100, **changes}))  # type: ignore[arg-type]
    assert not any(find_finished_runs(launch) for launch in changed_launches)


def test_damaged_run_folders_are_skipped(machine: Machine, options: Options) -> None:
    said(options)
    launch = compose_six(replace(options, iterations=100))[0]
    (folder,) = find_finished_runs(launch)
    (folder / records.RUN_FILE).write_text("{")
    assert find_finished_runs(launch) == []
    six = compose_six(replace(options, iterations=100))
    assert "1 of the 6" in announce_published(six)


def test_single_gpu_is_refused_before_anything_is_written(
    machine: Machine, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(LaunchError) as caught:
        said(options)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("Needs 2 GPUs, found 1")
    assert lines[1].startswith("'make demo' compares the same six strategies on CPU ranks")
    assert not options.runs.exists()
    assert machine.reported == []


@pytest.mark.parametrize("iterations", [1, 16, 17])
def test_too_few_iterations_for_fp16_are_refused(
    machine: Machine, options: Options, iterations: int
) -> None:
    with pytest.raises(LaunchError, match=f"ITERS={iterations} ends within fp16's skipped"):
        said(replace(options, iterations=iterations))


def test_a_dry_run_prints_six_commands(
    machine: Machine, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(replace(options, dry_run=True)) == (0, "")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all("--exit-interval 100" in line for line in lines)
    assert machine.trained == []
