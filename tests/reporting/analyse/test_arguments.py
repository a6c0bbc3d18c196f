"""Arguments that differ between the rows of a report, and what they say about a row."""

import io

import pytest
from rich.console import Console

from parakit.artifacts.run import Status
from parakit.config.published import Published
from parakit.config.strategy import Batch
from parakit.experiments.definition import Cell, Experiment, ExperimentFile
from parakit.experiments.engine import Study
from parakit.logs.runs import load_runs
from parakit.reporting.analyse.report import build_report
from parakit.reporting.command import named_logs
from parakit.reporting.explain.explanation import explain_runs
from tests.reporting.factory import log_text, run_record, write_run
from tests.reporting.render.test_build import made

TIMES = [9.0, *[8.0] * 14]


def printed(**changes):
    """Return a list of 150 arguments as Megatron prints it, with changes."""
    arguments = {f"argument_{number}": str(number) for number in range(150)} | changes
    lines = [f"  {name} ".ljust(51, ".") + f" {value}" for name, value in arguments.items()]
    heading = "------------------------ arguments ------------------------"
    end = "-------------------- end of arguments ---------------------"
    return "\n".join([heading, *lines, end, ""])


def report_of(folders):
    runs, problems = load_runs(folders)
    return build_report("r", runs, Published(), problems, all_conditions=True)


def train(root, name, rate, losses=None):
    record = run_record(name)
    record = run_record(name, argv=(*record.argv, "--lr", rate))
    log = printed(lr=str(float(rate)), seed=name) + log_text(TIMES, losses)
    return write_run(root, record, log)


def test_a_crashed_run_makes_no_argument_different(tmp_path):
    trained = [train(tmp_path, "a", "1e-3"), train(tmp_path, "b", "3e-4")]
    crashed = write_run(tmp_path, run_record("c", "tp2"), "Traceback\n", Status.CRASHED)
    report = report_of([*trained, crashed])
    differences = {difference.name: difference.values for difference in report.arguments}
    assert differences == {"lr": ("0.001", "0.0003", "")}


def test_a_shortened_list_of_a_foreign_log_makes_no_missing_argument_different(tmp_path):
    trained = train(tmp_path, "a", "1e-3")
    foreign = tmp_path / "foreign.log"
    lines = printed(lr="0.5").splitlines()
    foreign.write_text("\n".join([lines[0], *lines[-6:], ""]) + log_text(TIMES))
    report = report_of([trained, foreign])
    assert [difference.name for difference in report.arguments] == ["lr"]


def test_rows_of_one_strategy_are_labelled_by_the_argument_that_differs(tmp_path):
    folders = [train(tmp_path, "a", "1e-3"), train(tmp_path, "b", "3e-4")]
    labels = [entry.label for entry in report_of(folders).entries]
    assert labels == ["baseline ×1 lr 0.001", "baseline ×1 lr 0.0003"]


def test_losses_of_two_learning_rates_are_compared_after_the_last_common_iteration(tmp_path):
    losses = [10.8 - 0.01 * number for number in range(len(TIMES))]
    train(tmp_path / "runs", "a", "1e-3", [*losses[:-1], 10.314])
    train(tmp_path / "runs", "b", "3e-4", [*losses[:-1], 9.591])
    _, text, _ = made(tmp_path, 300)
    assert (
        "After 15 iterations the loss of baseline ×1 lr 0.0003 is 9.591, against 10.314 of "
        "baseline ×1 lr 0.001 (different --lr)." in text
    )


def test_losses_of_other_batches_are_not_compared(tmp_path):
    first = train(tmp_path, "a", "1e-3")
    second = write_run(tmp_path, run_record("b", "tp2", batch=Batch(2, 16)), log_text(TIMES))
    assert all(entry.parity.last_losses is None for entry in report_of([first, second]).entries)


def test_a_run_that_does_not_exist_is_named_with_the_newest_that_do(tmp_path):
    train(tmp_path / "runs", "2025-a", "1e-3")
    output = io.StringIO()
    console = Console(file=output, width=300)
    assert explain_runs([tmp_path / "nothing"], tmp_path / "runs", console) == 1
    text = output.getvalue()
    assert text.count("\n") == 1
    assert text == (
        f"There is no run {tmp_path / 'nothing'}; the newest runs of {tmp_path / 'runs'} are 2025-a.\n"
    )


@pytest.mark.parametrize("label", ["fast", "lr=3e-4", "with, comma"])
def test_the_label_of_an_experiments_cell_is_the_name_of_its_row(tmp_path, monkeypatch, label):
    folders = [train(tmp_path, name, "1e-3") for name in "ab"]
    log_words = []
    monkeypatch.setattr(
        "parakit.experiments.engine.call_module",
        lambda *arguments: log_words.extend(arguments) or 0,
    )

    class Result:
        cell = Cell(None, label)
        is_complete = True

    Result.folders = folders
    experiment = Experiment("mine", (Result.cell,), ExperimentFile("mine", []))
    study = object.__new__(Study)
    for name, value in {"results": [Result], "experiment": experiment}.items():
        object.__setattr__(study, name, value)
    monkeypatch.setattr(Study, "reports", tmp_path, raising=False)
    assert study.write_report() == 0
    assert named_logs(log_words[2]) == [(folder, label) for folder in folders]
