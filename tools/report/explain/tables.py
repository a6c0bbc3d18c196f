"""The tables of an explanation, equal ranks in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tools.records.measurements import Phase
from tools.report.analyse.time_shares import TimeShares
from tools.report.explain.closed_form import ComponentResidual
from tools.report.explain.predicted import CallRow, Unattributed
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

type Cells[T] = tuple[tuple[str, Callable[[T], str]], ...]


def _of_phase(phase: Phase) -> Callable[[TimeShares], str]:
    return lambda shares: percent(shares.phases.get(phase))


_TIME: Cells[TimeShares] = (
    ("ms", lambda shares: ms(shares.iteration_seconds)),
    *((name, _of_phase(phase)) for phase, name in _PHASES),
    ("of it communication", lambda shares: percent(shares.exposed_communication)),
    ("fwd/bwd+sync/opt", lambda s: " / ".join(f"{100 * share:.0f}" for share in s.as_published)),
)
_CALLS: Cells[CallRow] = (
    ("Group", lambda row: row.group),
    ("Operation", lambda row: row.operation),
    ("What", lambda row: row.what or "in no closed form"),
    ("Calls: measured", lambda row: count(row.measured_calls)),
    ("predicted", lambda row: count(row.predicted_calls)),
    ("On the wire: measured", lambda row: count(row.measured_wire_bytes)),
    ("predicted", lambda row: count(row.predicted_wire_bytes)),
    ("residual", lambda row: _whole(row.residual_wire_bytes)),
)
_UNATTRIBUTED: Cells[Unattributed] = (
    ("Group", lambda item: item.group),
    ("Operation", lambda item: item.operation),
    ("Bytes each", lambda item: count(item.payload_bytes)),
    ("Calls made", lambda item: count(item.calls) if item.calls > 0 else DASH),
    ("Calls missing", lambda item: count(-item.calls) if item.calls < 0 else DASH),
)
_MEMORY: Cells[ComponentResidual] = (
    ("Component", lambda found: found.component),
    ("Measured", lambda found: _shown(found, found.measured)),
    ("Predicted", lambda found: _shown(found, found.predicted)),
    ("Residual", lambda found: _residual(found.residual)),
    ("Of it", lambda found: "exact" if found.exact else _share(found)),
    ("Note", lambda found: found.note),
)
_BUBBLE: Cells[ComponentResidual] = (
    ("Measured", lambda found: percent(found.measured)),
    ("(p−1)/(m·v)", lambda found: percent(found.predicted)),
    ("Residual", lambda found: signed_percent(found.residual)),
    ("Unequal stages", lambda found: found.note),
)


def tables(subjects: Sequence[Subject]) -> tuple[TextTable, ...]:
    """Every table that has a line."""
    missing = tuple((s.label, "", note) for s in subjects for note in s.evidence.notes)
    found = (
        _table(
            *("time-shares", "Where each rank's iteration goes", subjects, _TIME),
            lambda each: ((shares.rank, shares) for shares in each.evidence.shares),
        ),
        _table(
            *("calls", "Calls of an iteration, predicted and measured", subjects, _CALLS),
            lambda each: ((c.rank, row) for c in each.evidence.calls for row in c.rows),
        ),
        _table(
            *("unattributed", "Calls that only one side has", subjects, _UNATTRIBUTED),
            lambda each: ((c.rank, item) for c in each.evidence.calls for item in c.unattributed),
        ),
        _table(
            "memory",
            "Parameters and memory at the peak, predicted and measured",
            subjects,
            _MEMORY,
            lambda each: (
                (found.rank, found)
                for found in (*each.evidence.parameters, *each.evidence.memory)
                if found.measured or found.predicted
            ),
        ),
        _table(
            *("bubble", "The pipeline's idle time over its working time", subjects, _BUBBLE),
            lambda each: ((found.rank, found) for found in each.evidence.bubble),
        ),
        TextTable("missing", "What is missing", ("Strategy", "Rank", "Missing"), missing),
    )
    return tuple(table for table in found if table.lines)


def _table[T](
    name: str,
    title: str,
    subjects: Sequence[Subject],
    cells: Cells[T],
    items: Callable[[Subject], Iterable[tuple[int, T]]],
) -> TextTable:
    """Items by rank as lines; those that are alike on several ranks, once."""
    lines: list[tuple[str, ...]] = []
    for subject in subjects:
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, item in items(subject):
            ranks.setdefault(tuple(cell(item) for _, cell in cells), []).append(rank)
        lines += ((subject.label, ", ".join(map(str, of)), *line) for line, of in ranks.items())
    return TextTable(name, title, ("Strategy", "Rank", *(head for head, _ in cells)), tuple(lines))


def _shown(found: ComponentResidual, value: float) -> str:
    return (count if found.component in _EXACT else amount)(int(value))


def _residual(value: float) -> str:
    return _whole(value) if abs(value) < 1e5 else signed(amount(value))


def _share(found: ComponentResidual) -> str:
    return signed_percent(found.residual / found.predicted if found.predicted else None)


def _whole(value: float) -> str:
    return "0" if not value else f"{value:+,.0f}".replace("-", "−")
