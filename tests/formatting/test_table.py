import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from parakit.formatting.table import (
    Column,
    Table,
    TextTable,
    csv_table,
    markdown_table,
    readable_table,
    rich_table,
)
from parakit.formatting.units import milliseconds, number, percent, size


@dataclass(frozen=True)
class Run:
    name: str
    seconds: float | None


TABLE = Table(
    (
        Column[Run]("strategy", lambda run: run.name, right=False),
        Column[Run]("time", lambda run: run.seconds, number, rank=1),
        Column[Run]("unknown", lambda run: None, percent, rank=2),
    ),
    (Run("tp2|sp2", 0.5), Run("=pp2", None)),
)


def test_unknown_value_is_a_dash_in_texts_and_empty_in_csv() -> None:
    assert TABLE.cells == [["tp2|sp2", "0.5000", "–"], ["=pp2", "–", "–"]]
    assert csv_table(TABLE) == "strategy,time,unknown\ntp2|sp2,0.5,\n'=pp2,,\n"


def test_markdown_cells_are_escaped() -> None:
    assert markdown_table(TABLE).splitlines()[2] == "| tp2\\|sp2 | 0.5000 | – |"


@pytest.mark.parametrize(
    ("width", "shown"), [(40, ["strategy", "time"]), (12, ["strategy"]), (80, ["strategy", "time"])]
)
def test_narrow_terminal_leaves_out_the_highest_ranks_and_columns_of_dashes(
    width: int, shown: list[str]
) -> None:
    assert TABLE.fitting(width).header == shown
    assert rich_table(TABLE.fitting(width)).row_count == 2


LONG = Table(
    (
        Column[str]("name", lambda text: "n" * 30, right=False),
        Column[str]("note", str, right=False, wraps=True, rank=1),
    ),
    ("a long note that is broken into lines where it has to be",),
)


def printed(table: Table[str], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(rich_table(table, width), crop=False)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_only_columns_that_wrap_are_broken_into_lines() -> None:
    wide, narrow = printed(LONG, 120), printed(LONG, 60)
    assert (len(wide), len(narrow)) == (5, 7)
    assert all("n" * 30 in lines[3] for lines in (wide, narrow, printed(LONG, 20)))
    assert narrow[3].split()[1:] == ["a", "long", "note", "that", "is", "broken"]
    assert (LONG.fitting(58).header, LONG.fitting(57).header) == (["name", "note"], ["name"])
    assert LONG.fitting(20).header == ["name"]


def test_words_are_broken_only_if_the_terminal_is_too_narrow_and_numbers_are_not() -> None:
    table = TextTable("t", "", ("communication", "sent"), (("a", "13,694,472"),))
    assert table.wrapping().widths(30) == [13, 10]
    assert table.wrapping().widths(20) == [6, 10]
    assert table.wrapping().widths(9) == [3, 2]


def test_sizes_and_times_have_the_expected_units_and_digits() -> None:
    assert (size(1.5 * 2**30), size(2**20), size(None)) == ("1.50 GiB", "1.0 MiB", "–")
    assert (number(0.0001), number(12345.6), milliseconds(-0.0123)) == (
        "1.000e-04",
        "12,346",
        "−12.3 ms",
    )


def shown(table: TextTable, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(readable_table(table, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_too_wide_for_a_terminal_becomes_paragraphs_with_unbroken_words() -> None:
    header = ("Strategy", "Rank", "Component", "Measured", "Predicted", "Note")
    note = "predicted at the output layer's backward and measured in forward, rounded up"
    lines = tuple(
        ("tp2", str(rank), "communication", "13,694,476", "13,694,476", note) for rank in (0, 1)
    )
    table = TextTable("memory", "Memory", header, (*lines, ("pp2", "0", "–", "", "", "")))
    assert shown(table, 200).splitlines()[2].split()[:2] == ["Strategy", "Rank"]
    narrow = shown(table, 60)
    assert narrow.split("\n")[:3] == [
        "Memory",
        " tp2",
        "   Rank 0 · Component communication · Measured 13,694,476 · ",
    ]
    assert (narrow.count(" tp2\n"), narrow.count("13,694,476")) == (1, 4)
    assert [line.rstrip() for line in narrow.splitlines()][-3:-1] == [" pp2", "   Rank 0"]
    assert max(map(len, narrow.splitlines())) <= 60
