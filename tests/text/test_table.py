from dataclasses import dataclass

import pytest

from tools.text.table import Column, Table, csv_table, markdown_table, rich_table
from tools.text.units import milliseconds, number, percent, size


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


def test_an_unknown_value_is_a_dash_for_people_and_empty_in_csv() -> None:
    assert TABLE.cells == [["tp2|sp2", "0.5000", "–"], ["=pp2", "–", "–"]]
    assert csv_table(TABLE) == "strategy,time,unknown\ntp2|sp2,0.5,\n'=pp2,,\n"


def test_markdown_escapes_what_would_end_a_cell() -> None:
    assert markdown_table(TABLE).splitlines()[2] == "| tp2\\|sp2 | 0.5000 | – |"


@pytest.mark.parametrize(
    ("width", "shown"), [(40, ["strategy", "time"]), (12, ["strategy"]), (80, ["strategy", "time"])]
)
def test_a_narrow_terminal_loses_the_last_ranks_and_columns_of_dashes(
    width: int, shown: list[str]
) -> None:
    assert TABLE.fitting(width).header == shown
    assert rich_table(TABLE.fitting(width)).row_count == 2


def test_units_leave_no_doubt() -> None:
    assert (size(1.5 * 2**30), size(2**20), size(None)) == ("1.50 GiB", "1.0 MiB", "–")
    assert (number(0.0001), number(12345.6), milliseconds(-0.0123)) == (
        "1.000e-04",
        "12,346",
        "−12.3 ms",
    )
