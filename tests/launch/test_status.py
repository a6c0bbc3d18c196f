import io
from pathlib import Path

import pytest
from rich.console import Console

from tools.launch.status import RunStatus, show_status

LONG = "20261122T010831Z-tp2pp2dp2-zero1-gpt3-1.3b-8gpu"
ROWS = (
    RunStatus("20261122T010808Z-baseline-gpt2-tiny-1cpu", "running", 3, 25, 10.1, 65.0),
    RunStatus(LONG, "crashed", 3, 25, 10.1, None, "rank 0: " + "a long reason " * 9 + "[end]"),
)


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_status(ROWS, Path("runs"), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_names_and_reasons_are_whole_however_narrow_the_terminal(width: int) -> None:
    text = shown(width)
    assert all(row.run in text for row in ROWS)
    assert "a long reason " * 3 in text
    assert "[end]" in text


def test_a_wide_terminal_has_the_reason_in_the_row_and_a_narrow_one_below() -> None:
    assert "note" in shown(120)
    assert f"{LONG}: rank 0:" in shown(80)
    assert "iteration" in shown(80)
