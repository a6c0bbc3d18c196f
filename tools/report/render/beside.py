"""Tables of the report beside what others say: published figures, the planner, an earlier report."""

from __future__ import annotations

from dataclasses import replace

from tools.report.analyse.earlier import Change
from tools.report.analyse.entry import Entry
from tools.report.analyse.planned import PlannedEntry
from tools.report.analyse.published import Match
from tools.report.analyse.report import Report
from tools.spec.published import Correction
from tools.text.table import Column, Table
from tools.text.units import (
    DASH,
    number,
    signed_percent,
)

MatchOf = tuple[Entry, Match]
_MS = 1e3


def _of_match(name: str, index: int, what: str) -> Column[MatchOf]:
    return Column[MatchOf](name, lambda pair: getattr(pair[index], what), right=False)


def _measured(pair: MatchOf) -> str | None:
    match = pair[1]
    return f"{number(match.measured)} {match.unit}" if match.measured else None


def _readings(pair: MatchOf) -> str:
    return f"{', '.join(map(number, pair[1].published))} {pair[1].unit}"


def _readings_and_source(pair: MatchOf) -> str:
    figure = pair[1].figure
    return f"{_readings(pair)} ({figure.model}, {figure.source.name})"


def _against_baseline(pair: MatchOf) -> str | None:
    """Time a sample over baseline's, here and as published."""
    entry, match = pair
    token = entry.speed.per_token if entry.speed else None
    if match.quantity != "iteration time" or not (token or entry.published_ratio):
        return None
    here = f"×{token.ratio:.2f}" if token else DASH
    return f"{here} | {f'×{entry.published_ratio:.2f}' if entry.published_ratio else DASH}"


def _origin(pair: MatchOf) -> str:
    figure = pair[1].figure
    caution = f"; {figure.caution}" if figure.caution else ""
    return f"{figure.model}, {figure.source.hardware} ({figure.source.name}){caution}"


def _expected(pair: MatchOf) -> str | None:
    match = pair[1]
    if match.verdict == "not comparable":
        return None
    return f"{number(match.expected_low)} – {number(match.expected_high)}"


_MEASURED = Column[MatchOf]("Measured", _measured)
_VERDICT = replace(_of_match("Verdict", 1, "verdict"), style=lambda found: "")


def page_matches(report: Report) -> Table[MatchOf]:
    """Published quantities beside the measured ones, with where they come from."""
    columns = (
        _of_match("Strategy", 0, "label"),
        _of_match("Quantity", 1, "quantity"),
        _MEASURED,
        Column[MatchOf]("Published", _readings),
        Column[MatchOf]("Time a sample, of baseline: here | published", _against_baseline),
        Column[MatchOf]("Of", _origin, right=False),
        Column[MatchOf]("Expected", _expected),
        _VERDICT,
        Column[MatchOf]("What differs", lambda pair: "; ".join(pair[1].differs), right=False),
    )
    return Table(columns, _matches(report))


def markdown_matches(report: Report) -> Table[MatchOf]:
    """The same in fewer columns."""
    columns = (
        _of_match("Strategy", 0, "label"),
        _of_match("Quantity", 1, "quantity"),
        _MEASURED,
        Column[MatchOf]("Published", _readings_and_source),
        _VERDICT,
        Column[MatchOf]("What differs", lambda pair: ", ".join(pair[1].differs), right=False),
    )
    return Table(columns, _matches(report))


def _matches(report: Report) -> tuple[MatchOf, ...]:
    return tuple((entry, match) for entry in report.entries for match in entry.matches)


def planned(report: Report) -> Table[PlannedEntry]:
    """What the planner predicts of each row, and how far predictions like it are off."""
    columns = (
        Column[PlannedEntry]("Strategy", lambda p: p.entry.label, right=False),
        Column[PlannedEntry]("ms/iteration", lambda p: p.entry.time_ms, number),
        Column[PlannedEntry]("Predicted", lambda p: _MS * p.known.seconds, number),
        Column[PlannedEntry]("Error", lambda p: p.error, signed_percent),
        Column[PlannedEntry]("80% interval", lambda p: p.known.interval(), _interval_of_seconds),
        Column[PlannedEntry]("By", lambda p: str(p.known), right=False),
    )
    return Table(columns, report.planned)


def _interval_of_seconds(value: tuple[float, float] | None) -> str:
    if value is None:
        return "nothing near was measured"
    return f"{number(_MS * value[0])} – {number(_MS * value[1])}"


def corrections(report: Report) -> Table[Correction]:
    """What the write-ups that are shown got wrong."""
    columns = (
        Column[Correction]("Source", lambda c: c.name, right=False),
        Column[Correction]("It says", lambda c: c.says, right=False),
        Column[Correction]("Right", lambda c: c.right, right=False),
    )
    return Table(columns, report.corrections)


def changes(report: Report) -> Table[Change]:
    """What is not as it was in the earlier report."""
    columns = (
        Column[Change]("Row", lambda c: c.row, right=False),
        Column[Change]("Change", lambda c: c.kind, right=False, style=lambda found: ""),
        Column[Change]("Numbers", lambda c: c.text, right=False),
    )
    return Table(columns, report.changes)
