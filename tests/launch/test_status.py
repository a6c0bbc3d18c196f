import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.launch import status
from parakit.launch.status import RunStatus, print_status

LONG = "20261122T010831Z-tp2pp2dp2-zero1-gpt3-1.3b-8gpu"
ROWS = (
    RunStatus("20261122T010808Z-baseline-gpt2-tiny-1cpu", "running", 3, 25, 10.1, 65.0),
    RunStatus(LONG, "crashed", 3, 25, 10.1, None, "rank 0: " + "a long reason " * 9 + "[end]"),
)


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_status(ROWS, Path("runs"), console)
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


def test_a_terminal_is_redrawn_until_no_run_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [[ROWS[0]], [replace(ROWS[0], memory_bytes=(2**30, 2**29))], [ROWS[1]]]
    monkeypatch.setattr(status, "read_run_statuses", lambda runs: seen.pop(0))
    monkeypatch.setattr(status, "REDRAW_SECONDS", 0)
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    status.watch_runs(Path("runs"), console)
    assert seen == []
    assert isinstance(console.file, io.StringIO)
    assert "1.00 0.50" in console.file.getvalue()


def test_without_a_terminal_it_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(status, "read_run_statuses", lambda runs: asked.append(runs) or list(ROWS))
    status.watch_runs(Path("runs"), Console(file=io.StringIO(), width=120))
    assert asked == [Path("runs")]


def test_a_folder_whose_name_is_no_utf8_is_shown_where_nothing_else_can_be_written() -> None:
    file = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict")
    print_status([replace(ROWS[0], run="a\udcffb")], Path("runs"), Console(file=file, width=120))


def test_the_newest_memory_of_each_rank_is_shown_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    lines = ["seconds,rank,memory_bytes", "0,0,1", "0,1,2", "1,0,3", "1,1,"]
    (run / "samples.csv").write_text("\n".join(lines) + "\n")
    for lives, memory in ((False, ()), (True, (3.0, 2.0))):
        monkeypatch.setattr(status.records, "looks_alive", lambda folder, lives=lives: lives)
        assert [row.memory_bytes for row in status.read_run_statuses(tmp_path)] == [memory]
