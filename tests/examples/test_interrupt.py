from pathlib import Path

import pytest

from tests.examples.stopped import MOMENTS, Stopped
from tools.records import run as records
from tools.records.run import Status


@pytest.mark.parametrize("number", MOMENTS, ids=lambda number: number.name)
def test_a_run_that_is_asked_to_stop_ends_all_ranks_within_ten_seconds(
    number: int, stopped: dict[int, Stopped]
) -> None:
    run = stopped[number]
    assert run.exit_code == 130
    assert run.seconds < 10
    assert run.processes >= 3
    assert records.read_status(Path(run.folder)).status is Status.INTERRUPTED
