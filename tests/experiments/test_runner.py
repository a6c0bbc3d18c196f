from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.config.errors import LaunchError
from parakit.experiments import runner as module
from parakit.experiments.definition import Cell, Experiment, ExperimentFile
from parakit.experiments.runner import Runner
from parakit.launch.compose import Launch
from parakit.launch.options import Options
from parakit.launch.run_folder import create_run_folder
from parakit.launch.train import compose_job
from tests.experiments.factory import cell


class Trained:
    """Fake trainer that records what was trained. Runs succeed and write their folder unless they are refused."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.refused = ""
        self.seeds: list[int] = []

    def execute(self, launch: Launch, runs: Path, *_: object) -> tuple[Path, StatusRecord]:
        self.names.append(launch.spec.name)
        if launch.spec.name == self.refused:
            raise LaunchError("The disk is full.")
        folder = create_run_folder(launch, runs)
        status = StatusRecord(Status.OK, 0)
        write_record(folder / records.STATUS_FILE, status)
        return folder, status

    def start(self, launch: Launch, _: Console) -> None:
        self.seeds.append(launch.job.options.seed)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    trainer = Trained()
    monkeypatch.setattr(module, "execute_launch", trainer.execute)
    monkeypatch.setattr(module, "ensure_initial_checkpoint", trainer.start)
    return trainer


@pytest.fixture
def options(sample_prefix: Path, tmp_path: Path) -> Options:
    return Options(data=str(sample_prefix), runs=tmp_path / "runs")


def runner(cells: Sequence[Cell], takes_finished: bool = False) -> Runner:
    file = ExperimentFile(report="r", cells=[], takes_finished=takes_finished)
    experiment = Experiment("r", tuple(cells), file)
    return Runner(experiment, {cell: compose_job(cell.job) for cell in cells}, Console(quiet=True))


def test_finished_runs_are_reused_only_if_the_experiment_allows_it(
    trained: Trained, options: Options
) -> None:
    dp2, tp2 = cell("dp2", options=options), cell("tp2", options=options)
    first = runner([dp2])
    first.train()
    (made,) = first.list_results()
    again = runner([dp2, tp2], takes_finished=True)
    again.train()
    assert again.list_results()[0].runs == made.runs
    assert trained.names == ["dp2", "tp2"]
    once_more = runner([dp2])
    once_more.train()
    assert once_more.list_results()[0].runs != made.runs
    assert trained.names == ["dp2", "tp2", "dp2"]


def test_failed_cell_is_not_repeated_and_other_cells_are_trained(
    trained: Trained, options: Options
) -> None:
    trained.refused = "dp2"
    experiment_runner = runner([cell(name, options=options, repeats=2) for name in ("dp2", "tp2")])
    experiment_runner.train()
    failed, well = experiment_runner.list_results()
    assert trained.names == ["dp2", "tp2", "tp2"]
    assert (failed.failure, failed.is_complete, failed.folders) == ("The disk is full.", False, ())
    assert (len(well.runs), well.is_complete) == (2, True)


def test_initial_weights_of_a_cell_use_its_seed(trained: Trained, options: Options) -> None:
    runner([cell("dp2", options=options, seed=seed) for seed in (1234, 1235)]).train()
    assert trained.seeds == [1234, 1235]
