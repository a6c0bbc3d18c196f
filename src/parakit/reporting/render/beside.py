"""Tables of the report beside what others say: published figures, the planner, an earlier report."""

from __future__ import annotations

from parakit.config.published import Correction
from parakit.formatting.table import Column, Table
from parakit.formatting.units import DASH, number, signed_percent
from parakit.reporting.analyse.earlier import Change
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.planned import PlannedEntry
from parakit.reporting.analyse.published import Match
from parakit.reporting.analyse.report import Report

MatchOf = tuple[Entry, Match]
_MS = 1e3


def page_matches_table(report: Report) -> Table[MatchOf]:
    """Published quantities beside the measured ones, with where they come from."""

    def of(match: Match) -> str:
        figure = match.figure
        caution = f"; {figure.caution}" if figure.caution else ""
        return f"{figure.model}, {figure.source.hardware} ({figure.source.name}){caution}"

    def expected(match: Match) -> str | None:
        low, high = match.expected_low, match.expected_high
        known = match.verdict != "not comparable"
        return f"{number(low)} – {number(high)}" if known else None

    def against_baseline(pair: MatchOf) -> str | None:
        """Time a sample over baseline's, here and as published."""
        entry, match = pair
        token = entry.per_token
        if match.quantity != "iteration time" or not (token or entry.published_ratio):
            return None
        ratios = (token.ratio if token else None, entry.published_ratio)
        return " | ".join(f"×{ratio:.2f}" if ratio else DASH for ratio in ratios)

    columns = (
        *_OF_MATCH[:3],
        Column[MatchOf]("Published", lambda pair: _readings(pair[1])),
        Column[MatchOf]("Time a sample, of baseline: here | published", against_baseline),
        Column[MatchOf]("Of", lambda pair: of(pair[1]), right=False),
        Column[MatchOf]("Expected", lambda pair: expected(pair[1])),
        _OF_MATCH[3],
        Column[MatchOf]("What differs", lambda pair: "; ".join(pair[1].differs), right=False),
    )
    return Table(columns, _matches(report))


def markdown_matches_table(report: Report) -> Table[MatchOf]:
    """The same in fewer columns."""

    def readings(match: Match) -> str:
        return f"{_readings(match)} ({match.figure.model}, {match.figure.source.name})"

    columns = (
        *_OF_MATCH[:3],
        Column[MatchOf]("Published", lambda pair: readings(pair[1])),
        _OF_MATCH[3],
        Column[MatchOf]("What differs", lambda pair: ", ".join(pair[1].differs), right=False),
    )
    return Table(columns, _matches(report))


def _matches(report: Report) -> tuple[MatchOf, ...]:
    return tuple((entry, match) for entry in report.entries for match in entry.matches)


def _readings(match: Match) -> str:
    return f"{', '.join(map(number, match.published))} {match.unit}"


def _measured(pair: MatchOf) -> str | None:
    match = pair[1]
    return f"{number(match.measured)} {match.unit}" if match.measured else None


_OF_MATCH = (
    Column[MatchOf]("Strategy", lambda pair: pair[0].label, right=False),
    Column[MatchOf]("Quantity", lambda pair: pair[1].quantity, right=False),
    Column[MatchOf]("Measured", _measured),
    Column[MatchOf]("Verdict", lambda pair: pair[1].verdict, right=False, style=lambda _: ""),
)


def planned_table(report: Report) -> Table[PlannedEntry]:
    """What the planner predicts of each row, and how far predictions like it are off."""

    def interval(row: PlannedEntry) -> str:
        ends = row.known.interval() or ()
        return " – ".join(number(_MS * end) for end in ends) or "nothing near was measured"

    columns = (
        Column[PlannedEntry]("Strategy", lambda p: p.entry.label, right=False),
        Column[PlannedEntry]("ms/iteration", lambda p: p.entry.time_ms, number),
        Column[PlannedEntry]("Predicted", lambda p: _MS * p.known.seconds, number),
        Column[PlannedEntry]("Error", lambda p: p.error, signed_percent),
        Column[PlannedEntry]("80% interval", interval),
        Column[PlannedEntry]("By", lambda p: str(p.known), right=False),
    )
    return Table(columns, report.planned)


def corrections_table(report: Report) -> Table[Correction]:
    """What the write-ups that are shown got wrong."""
    columns = (
        Column[Correction]("Source", lambda c: c.name, right=False),
        Column[Correction]("It says", lambda c: c.says, right=False),
        Column[Correction]("Right", lambda c: c.right, right=False),
    )
    return Table(columns, report.corrections)


def changes_table(report: Report) -> Table[Change]:
    """What is not as it was in the earlier report."""
    columns = (
        Column[Change]("Row", lambda c: c.row, right=False),
        Column[Change]("Change", lambda c: c.kind, right=False, style=lambda found: ""),
        Column[Change]("Numbers", lambda c: c.text, right=False),
    )
    return Table(columns, report.changes)
