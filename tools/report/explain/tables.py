"""The tables of an explanation, equal ranks in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tools.records.measurements import Phase
from tools.report.analyse.time_shares import TimeShares
from tools.report.explain.closed_form import ComponentResidual
from tools.report.explain.subjects import Subject
from tools.text.table import TextTable
from tools.text.units import DASH, amount, count, ms, percent, signed, signed_percent

_PHASES = (
    (Phase.FORWARD, "forward"),
    (Phase.BACKWARD, "backward"),
    (Phase.GRADIENT_SYNC, "gradient sync"),
    (Phase.OPTIMIZER, "optimizer"),
    (Phase.PIPELINE, "pipeline wait"),
    (Phase.DATA, "data"),
    (Phase.OTHER, "other"),
)
_EXACT = ("parameters", "weights", "gradients")
Line = list[str]
LinesOf = Callable[[Subject], Iterable[tuple[int, Line]]]


def tables(subjects: Sequence[Subject]) -> tuple[TextTable, ...]:
    """Every table that has a line."""
    found = (
        TextTable(
            "time-shares",
            "Where each rank's iteration goes",
            (
                "Strategy",
                "Rank",
                "ms",
                *(name for _, name in _PHASES),
                "of it communication",
                "fwd/bwd+sync/opt",
            ),
            _lines(subjects, _time_lines),
        ),
        TextTable(
            "calls",
            "Calls of an iteration, predicted and measured",
            (
                "Strategy",
                "Rank",
                "Group",
                "Operation",
                "What",
                "Calls: measured",
                "predicted",
                "On the wire: measured",
                "predicted",
                "residual",
            ),
            _lines(subjects, _call_lines),
        ),
        TextTable(
            "unattributed",
            "Calls that only one side has",
            ("Strategy", "Rank", "Group", "Operation", "Bytes each", "Calls made", "Calls missing"),
            _lines(subjects, _unattributed_lines),
        ),
        TextTable(
            "memory",
            "Parameters and memory at the peak, predicted and measured",
            ("Strategy", "Rank", "Component", "Measured", "Predicted", "Residual", "Of it", "Note"),
            _lines(subjects, _memory_lines),
        ),
        TextTable(
            "bubble",
            "The pipeline's idle time over its working time",
            ("Strategy", "Rank", "Measured", "(p−1)/(m·v)", "Residual", "Unequal stages"),
            _lines(subjects, _bubble_lines),
        ),
        TextTable(
            "missing",
            "What is missing",
            ("Strategy", "Rank", "Missing"),
            tuple((s.label, "", note) for s in subjects for note in s.evidence.notes),
        ),
    )
    return tuple(table for table in found if table.lines)


def _lines(subjects: Sequence[Subject], lines_of: LinesOf) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (subject.label, ranks, *cells)
        for subject in subjects
        for ranks, cells in _merged(lines_of(subject))
    )


def _merged(lines: Iterable[tuple[int, Line]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lines that are alike on several ranks, once."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, cells in lines:
        ranks.setdefault(tuple(cells), []).append(rank)
    for alike, found in ranks.items():
        yield ", ".join(map(str, found)), alike


def _time_lines(subject: Subject) -> Iterator[tuple[int, Line]]:
    for shares in subject.evidence.shares:
        yield shares.rank, _time_line(shares)


def _time_line(shares: TimeShares) -> Line:
    published = " / ".join(f"{100 * share:.0f}" for share in shares.as_published)
    phases = [percent(shares.phases.get(phase)) for phase, _ in _PHASES]
    milliseconds = ms(shares.iteration_seconds)
    return [milliseconds, *phases, percent(shares.exposed_communication), published]


def _call_lines(subject: Subject) -> Iterator[tuple[int, Line]]:
    for comparison in subject.evidence.calls:
        for row in comparison.rows:
            yield (
                comparison.rank,
                [
                    row.group,
                    row.operation,
                    row.what or "in no closed form",
                    count(row.measured_calls),
                    count(row.predicted_calls),
                    count(row.measured_wire_bytes),
                    count(row.predicted_wire_bytes),
                    _whole(row.residual_wire_bytes),
                ],
            )


def _unattributed_lines(subject: Subject) -> Iterator[tuple[int, Line]]:
    for comparison in subject.evidence.calls:
        for item in comparison.unattributed:
            made = count(item.calls) if item.calls > 0 else DASH
            missing = count(-item.calls) if item.calls < 0 else DASH
            cells = [item.group, item.operation, count(item.payload_bytes), made, missing]
            yield comparison.rank, cells


def _memory_lines(subject: Subject) -> Iterator[tuple[int, Line]]:
    for found in (*subject.evidence.parameters, *subject.evidence.memory):
        if found.measured or found.predicted:
            yield found.rank, _memory_line(found)


def _memory_line(found: ComponentResidual) -> Line:
    exact = found.component in _EXACT
    show = count if exact else amount
    residual = (
        _whole(found.residual) if abs(found.residual) < 1e5 else signed(amount(found.residual))
    )
    share = signed_percent(found.residual / found.predicted if found.predicted else None)
    share = "exact" if found.exact else share
    measured, predicted = show(int(found.measured)), show(int(found.predicted))
    return [found.component, measured, predicted, residual, share, found.note]


def _bubble_lines(subject: Subject) -> Iterator[tuple[int, Line]]:
    for found in subject.evidence.bubble:
        cells = [percent(found.measured), percent(found.predicted)]
        yield found.rank, [*cells, signed_percent(found.residual), found.note]


def _whole(value: float) -> str:
    return "0" if not value else f"{value:+,.0f}".replace("-", "−")
