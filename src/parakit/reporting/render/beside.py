"""Define the tables that compare a report with others: published figures, the planner, an earlier report."""

from __future__ import annotations

from parakit.config.published import Correction
from parakit.formatting.table import Column, Table
from parakit.formatting.units import DASH, number, signed_percent
from parakit.reporting.analyse.earlier import Change
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.planned import PlannedEntry
from parakit.reporting.analyse.published import Match
from parakit.reporting.analyse.report import Report

MatchedEntry = tuple[Entry, Match]
"""Row of the report with one published quantity that matches it."""
_MS_PER_SECOND = 1e3


def page_matches_table(report: Report) -> Table[MatchedEntry]:
    """Return the table of published quantities and their measured counterparts, for the HTML page."""
    columns = (
        *_COMMON_COLUMNS,
        Column[MatchedEntry]("Published", lambda pair: _published_text(pair[1])),
        Column[MatchedEntry]("Time per sample over baseline's: here | published", _baseline_ratios),
        Column[MatchedEntry]("Of", lambda pair: _source_text(pair[1]), right=False),
        Column[MatchedEntry]("Expected", lambda pair: _expected_text(pair[1])),
        _VERDICT,
        Column[MatchedEntry]("What differs", lambda pair: "; ".join(pair[1].differs), right=False),
    )
    return Table(columns, _list_matches(report))


def markdown_matches_table(report: Report) -> Table[MatchedEntry]:
    """Return the table of published quantities and their measured counterparts, with fewer columns for Markdown."""

    def published_with_source(match: Match) -> str:
        return f"{_published_text(match)} ({match.figure.model}, {match.figure.source.name})"

    columns = (
        *_COMMON_COLUMNS,
        Column[MatchedEntry]("Published", lambda pair: published_with_source(pair[1])),
        _VERDICT,
        Column[MatchedEntry]("What differs", lambda pair: ", ".join(pair[1].differs), right=False),
    )
    return Table(columns, _list_matches(report))


def _list_matches(report: Report) -> tuple[MatchedEntry, ...]:
    """Return every row with each published quantity that matches it."""
    return tuple((entry, match) for entry in report.entries for match in entry.matches)


def _published_text(match: Match) -> str:
    """Return the published values with their unit."""
    return f"{', '.join(map(number, match.published))} {match.unit}"


def _measured_text(pair: MatchedEntry) -> str | None:
    """Return the measured value with its unit; None if it was not measured."""
    match = pair[1]
    return f"{number(match.measured)} {match.unit}" if match.measured else None


def _source_text(match: Match) -> str:
    """Return model, hardware and write-up of a published figure, with its caution."""
    figure = match.figure
    caution = f"; {figure.caution}" if figure.caution else ""
    return f"{figure.model}, {figure.source.hardware} ({figure.source.name}){caution}"


def _expected_text(match: Match) -> str | None:
    """Return the range in which a reproduced value lies; None if nothing can be compared."""
    if match.verdict == "not comparable":
        return None
    return f"{number(match.expected_low)} – {number(match.expected_high)}"


def _baseline_ratios(pair: MatchedEntry) -> str | None:
    """Return a row's time per sample divided by baseline's: measured, then published.

    None means that both ratios are unknown, or that the quantity is not a time.
    """
    entry, match = pair
    if match.quantity != "iteration time":
        return None
    measured_ratio = entry.per_token.ratio if entry.per_token else None
    published_ratio = entry.published_ratio
    if not measured_ratio and not published_ratio:
        return None
    ratios = (measured_ratio, published_ratio)
    return " | ".join(f"×{ratio:.2f}" if ratio else DASH for ratio in ratios)


_COMMON_COLUMNS = (
    Column[MatchedEntry]("Strategy", lambda pair: pair[0].label, right=False),
    Column[MatchedEntry]("Quantity", lambda pair: pair[1].quantity, right=False),
    Column[MatchedEntry]("Measured", _measured_text),
)
_VERDICT = Column[MatchedEntry](
    "Verdict", lambda pair: pair[1].verdict, right=False, style=lambda _: ""
)


def planned_table(report: Report) -> Table[PlannedEntry]:
    """Return the table of predicted and measured times, with the error and the 80% interval of each prediction."""

    def interval(row: PlannedEntry) -> str:
        ends = row.known.interval()
        if not ends:
            return "nothing near was measured"
        return " – ".join(number(_MS_PER_SECOND * end) for end in ends)

    columns = (
        Column[PlannedEntry]("Strategy", lambda row: row.entry.label, right=False),
        Column[PlannedEntry]("ms/iteration", lambda row: row.entry.time_ms, number),
        Column[PlannedEntry]("Predicted", lambda row: _MS_PER_SECOND * row.known.seconds, number),
        Column[PlannedEntry]("Error", lambda row: row.error, signed_percent),
        Column[PlannedEntry]("80% interval", interval),
        Column[PlannedEntry]("By", lambda row: str(row.known), right=False),
    )
    return Table(columns, report.planned)


def corrections_table(report: Report) -> Table[Correction]:
    """Return the table of errors in the write-ups whose figures the report shows."""
    columns = (
        Column[Correction]("Source", lambda correction: correction.name, right=False),
        Column[Correction]("It says", lambda correction: correction.says, right=False),
        Column[Correction]("Right", lambda correction: correction.right, right=False),
    )
    return Table(columns, report.corrections)


def changes_table(report: Report) -> Table[Change]:
    """Return the table of changes since an earlier report."""
    columns = (
        Column[Change]("Row", lambda change: change.row, right=False),
        Column[Change]("Change", lambda change: change.kind, right=False, style=lambda _: ""),
        Column[Change]("Numbers", lambda change: change.text, right=False),
    )
    return Table(columns, report.changes)
