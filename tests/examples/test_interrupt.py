from pathlib import Path

import pytest

from parakit.artifacts import run as records
from parakit.artifacts.run import Status
from tests.examples.runs import SharedRuns
from tests.examples.stopped import MOMENTS, Stopped


@pytest.fixture
def stopped(shared_runs: SharedRuns) -> dict[str, Stopped]:
    made = shared_runs.scenario("stopped")
    return {number: Stopped(**fields) for number, fields in made.items()}


@pytest.mark.parametrize("number", MOMENTS)
def test_stopping_a_run_ends_all_ranks(number: int, stopped: dict[str, Stopped]) -> None:
    """These ranks are forked. `tests/faults/test_kills.py` stops ranks of torchrun and resumes them."""
    run = stopped[str(int(number))]
    assert run.exit_code == 130
    assert (run.ranks, run.survivors) == (3, 0)
    assert records.read_status(Path(run.folder)).status is Status.INTERRUPTED
