"""The report at the end of an experiment, written by the program that users call."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from parakit.experiments.engine import Study
from tests.reporting.factory import log_text, run_record, write_run


def study(reports: Path, *results: SimpleNamespace) -> Study:
    """Return a study whose cells have these results."""
    experiment: Any = SimpleNamespace(report="demo")
    planned: Any = None
    runner: Any = SimpleNamespace(list_results=lambda: list(results))
    return Study(experiment, planned, runner, Console(), reports)


@pytest.mark.ranks
def test_report_of_all_runs_is_written_to_the_folder_of_the_experiment(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "runs", run_record("one"), log_text([900.0] + [80.0] * 12))
    cell = SimpleNamespace(label="")
    ended = SimpleNamespace(cell=cell, folders=(folder,), is_complete=True)
    failed = SimpleNamespace(cell=cell, folders=(), is_complete=False)
    assert study(tmp_path / "reports", ended).write_report() == 0
    assert (tmp_path / "reports/demo/report.html").is_file()
    assert study(tmp_path / "reports", ended, failed).write_report() == 1
