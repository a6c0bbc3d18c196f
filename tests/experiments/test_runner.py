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
from parakit.experiments.runner import Disturbance, Runner
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


@pytest.fixture
def disturbances(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of strategies; the next run of each that is looked at was disturbed."""
    names: list[str] = []

    def find(folder: Path) -> Disturbance:
        name = next((name for name in names if f"-{name}-" in folder.name), "")
        if not name:
            return Disturbance("", 5.0)
        names.remove(name)
        return Disturbance("rank 1 got 34% of a core", 5.0)

    monkeypatch.setattr(module, "find_disturbance", find)
    return names


def test_a_disturbed_cell_is_trained_once_more_after_all_cells(
    trained: Trained, options: Options, disturbances: list[str]
) -> None:
    disturbances.append("dp2")
    experiment_runner = runner([cell(name, options=options) for name in ("dp2", "tp2")])
    experiment_runner.train()
    assert trained.names == ["dp2", "tp2", "dp2"]
    dp2, tp2 = experiment_runner.list_results()
    (first, second) = experiment_runner._runs[dp2.cell]
    assert (dp2.runs, dp2.replaced, dp2.folders) == ((second,), (first,), (second, first))
    assert (len(tp2.runs), tp2.replaced) == (1, ())


def test_a_cell_that_is_disturbed_again_is_not_trained_a_third_time(
    trained: Trained, options: Options, disturbances: list[str]
) -> None:
    disturbances += ["dp2", "dp2"]
    experiment_runner = runner([cell("dp2", options=options)])
    experiment_runner.train()
    assert trained.names == ["dp2", "dp2"]
    (result,) = experiment_runner.list_results()
    assert (len(result.runs), len(result.replaced)) == (1, 1)


def test_no_other_cell_is_repeated_if_the_first_one_is_disturbed_again(
    trained: Trained, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Disturbance("rank 0 got 20% of a core", 5.0)
    monkeypatch.setattr(module, "find_disturbance", lambda _: busy)
    runner([cell(name, options=options) for name in ("dp2", "tp2")]).train()
    assert trained.names == ["dp2", "tp2", "dp2"]


def test_a_repeated_command_trains_a_disturbed_run_of_an_earlier_one_again(
    trained: Trained, options: Options, disturbances: list[str]
) -> None:
    dp2 = cell("dp2", options=options)
    runner([dp2]).train()
    disturbances.append("dp2")
    second = runner([dp2], takes_finished=True)
    second.train()
    assert trained.names == ["dp2", "dp2"]
    third = runner([dp2], takes_finished=True)
    third.train()
    assert trained.names == ["dp2", "dp2"]
    assert third.list_results()[0].runs == second.list_results()[0].runs


def test_an_expensive_disturbed_cell_is_not_trained_again(
    trained: Trained, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Disturbance("rank 0 got 20% of a core", module.LONGEST_RERUN_SECONDS + 1)
    monkeypatch.setattr(module, "find_disturbance", lambda _: long)
    runner([cell("dp2", options=options)]).train()
    assert trained.names == ["dp2"]


def test_a_second_run_that_fails_leaves_the_first_one(
    trained: Trained, options: Options, disturbances: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbances.append("dp2")
    experiment_runner = runner([cell("dp2", options=options)])
    find = module.find_disturbance

    def find_and_refuse(folder: Path) -> Disturbance:
        trained.refused = "dp2"
        return find(folder)

    monkeypatch.setattr(module, "find_disturbance", find_and_refuse)
    experiment_runner.train()
    (result,) = experiment_runner.list_results()
    assert trained.names == ["dp2", "dp2"]
    assert (result.is_complete, result.failure, len(result.runs)) == (True, "", 1)
