"""Every table of a report, defined once: its columns and rows, whatever it is rendered to.

The results exist in three selections of the same columns: the page has most, Markdown fewer, and a
terminal those that fit, the most important first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from parakit.artifacts.run import Status
from parakit.formatting.table import Column, Table
from parakit.formatting.units import DASH, bracketed, count, interval, loss, number, percent, size
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.report import ArgumentDifference, Report
from parakit.reporting.analyse.results import describe_other_attempts, write_row_notes
from parakit.reporting.analyse.statistics import Estimate, TimeComparison

_MAX_VALUES = 12
"""Rows whose arguments stand side by side; those of more are counted by value."""
_STYLES = {"ok": "green", "held": "green", "reference": "cyan", "": "dim", "running": "cyan"}


def format_ratio(found: TimeComparison) -> str:
    """`×1.24 slower`, without its interval."""
    return f"×{found.ratio:.2f} {found.verdict}"


def format_speed(entry: Entry) -> str:
    """Return `×1.24 slower`, with the ratio per device where the numbers of devices differ."""
    speed = entry.speed
    if speed is None or speed.per_token is None:
        return ""
    if speed.per_device_token is None:
        return format_ratio(speed.per_token)
    return f"×{speed.per_token.ratio:.3g}, per device {format_ratio(speed.per_device_token)}"


def format_time(found: Estimate | None, shape: str = ".1f") -> str:
    """`157.8 [140.5, 175.2]`, by the format specification."""
    return DASH if found is None else bracketed(found.median, found.low, found.high, shape)


def _published(entry: Entry) -> tuple[float, str] | None:
    """The published time of the strategy and the same model."""
    figure = entry.figure
    if figure is None or figure.mean_iteration_ms is None or figure.model != entry.run.model:
        return None
    return figure.mean_iteration_ms, number(figure.mean_iteration_ms)


def _printed(entry: Entry) -> tuple[float, str] | None:
    """Megatron's own throughput, with its FLOPs over the kit's count."""
    rate, factor = entry.rates.printed_tflops_per_device, entry.rates.printed_over_counted
    over = f" (×{factor:.3g})" if factor else ""
    return None if rate is None else (rate, number(rate) + over)


_NO_MODEL = "no time, or no model that a rate follows from"


def _no_tokens(entry: Entry) -> str:
    run = entry.run
    lacking = {"time": entry.time_ms, "global batch": run.global_batch_size}
    names = [name for name, known in (lacking | {"sequence": run.seq_length}).items() if not known]
    return f"the log does not say its {' and '.join(names)}" if names else "not known"


def _no_mfu(entry: Entry) -> str:
    if entry.run.device == "cpu":
        return "CPU ranks have no peak rate"
    return next((note for note in entry.rates.notes if note.startswith("no MFU")), _NO_MODEL)


_LABEL = Column[Entry]("Strategy", lambda e: e.label, right=False)
_MODEL = Column[Entry]("Model", lambda e: e.run.model or None, right=False)
_DEVICE = Column[Entry]("Device", lambda e: e.run.device or None, right=False)
_STATUS = Column[Entry](
    "Status", lambda e: e.status, right=False, style=lambda e: _STYLES.get(e.status, "bold red")
)
_TIME = Column[Entry](
    "ms/iteration", lambda entry: entry.time_ms, number, why=lambda e: e.run.window.text
)
_INTERVAL = Column[Entry](
    "95% interval",
    lambda e: e.interval,
    lambda value: " – ".join(map(number, value)),
    why="fewer than 6 iterations count",
)
_SPEED = Column[Entry](
    "Time a token",
    lambda e: (e.per_token.ratio, format_speed(e)) if e.per_token else None,
    itemgetter(1),
    why=lambda e: (
        (e.speed.caution or "not comparable")
        if e.speed
        else "the reference, or nothing to compare it with"
    ),
)
_RATE = Column[Entry]("Tokens/s", lambda e: e.rates.tokens_per_second, number, why=_no_tokens)
_LOSS = Column[Entry](
    "Final loss", lambda e: e.final_loss, loss, why="no line has the loss of a whole step"
)
_PARITY = Column[Entry](
    "Parity",
    lambda e: e.parity.verdict or None,
    right=False,
    style=lambda e: (
        "bold red"
        if e.parity.verdict.startswith("broken")
        else _STYLES.get(e.parity.verdict, "yellow")
    ),
    why="no other run must print the same losses",
)
_PARAMETERS = Column[Entry](
    "Parameters/rank", lambda e: e.largest_parameters, count, why="not printed"
)
_MEMORY = Column[Entry](
    "Peak memory", lambda e: e.peak_bytes, size, why="neither a ledger nor a memory line"
)
_SENT = Column[Entry]("Sent/iteration", lambda e: e.sent_bytes, size, why="no communication ledger")
_MFU = Column[Entry]("MFU", lambda e: e.rates.mfu, percent, why=_no_mfu)
_PUBLISHED = Column[Entry](
    "Published ms", _published, itemgetter(1), why="nothing of this model and strategy"
)
_NOTES = Column[Entry]("Notes", write_row_notes, right=False)
_PARITY_OR_BLANK = replace(_PARITY, value=lambda e: e.parity.verdict)

_OF_PAGE = (
    _LABEL,
    _MODEL,
    _DEVICE,
    _STATUS,
    _TIME,
    _INTERVAL,
    _SPEED,
    _RATE,
    _LOSS,
    _PARITY,
    _PARAMETERS,
    _MEMORY,
    Column[Entry]("Device memory", lambda e: e.device_bytes, size, why="no reading of a device"),
    _SENT,
    Column[Entry](
        "Tokens/s/device", lambda e: e.rates.tokens_per_second_per_device, number, why=_no_tokens
    ),
    Column[Entry](
        "TFLOP/s/device", lambda e: e.rates.model_tflops_per_device, number, why=_NO_MODEL
    ),
    Column[Entry]("Printed TFLOP/s", _printed, itemgetter(1), why="no line has it"),
    _MFU,
    Column[Entry]("HFU", lambda e: e.rates.hfu, percent, why=_no_mfu),
    _PUBLISHED,
)


def _time_and_interval(entry: Entry) -> str:
    span = f" [{interval(*entry.interval)}]" if entry.interval else ""
    return number(entry.time_ms) + span


def _status_and_attempts(entry: Entry) -> str:
    attempts = ", ".join(describe_other_attempts(entry.configuration)).replace("earlier ", "")
    return f"{entry.status} ({attempts})" if attempts else entry.status


_OF_MARKDOWN = (
    _LABEL,
    _MODEL,
    _DEVICE,
    _STATUS,
    Column[Entry]("ms/iteration [95%]", _time_and_interval),
    _SPEED,
    _RATE,
    _MFU,
    replace(_LOSS, name="Loss"),
    _PARITY_OR_BLANK,
    _PARAMETERS,
    _MEMORY,
    _NOTES,
)
_OF_TERMINAL = (
    replace(_LABEL, name="strategy", rank=0),
    replace(_STATUS, name="status", rank=5, value=_status_and_attempts),
    replace(_TIME, rank=1),
    replace(_INTERVAL, name="95%", rank=7, text=lambda found: interval(*found)),
    replace(_SPEED, name="time a token", rank=8, right=False),
    replace(_RATE, name="tokens/s", rank=4),
    replace(_MFU, rank=12),
    replace(_LOSS, name="loss", rank=3),
    replace(_PARITY_OR_BLANK, name="parity", rank=2),
    replace(_PARAMETERS, name="params/rank", rank=9),
    replace(_MEMORY, name="peak memory", rank=10),
    replace(_SENT, name="sent/iter.", rank=11),
    replace(_PUBLISHED, name="published", rank=6),
)


def page_results_table(report: Report) -> Table[Entry]:
    """Results with every column of which something is known."""
    table = Table(_OF_PAGE, report.entries)
    known = zip(*table.cells, strict=True) if report.entries else [()] * len(_OF_PAGE)
    columns = (c for c, texts in zip(_OF_PAGE, known, strict=True) if {*texts} - {"", DASH})
    return replace(table, columns=tuple(columns))


def markdown_results_table(report: Report) -> Table[Entry]:
    """Results with notes, for a text that is read and not sorted."""
    return Table(_OF_MARKDOWN, report.entries)


def terminal_results_table(title: str, entries: Sequence[Entry], width: int) -> Table[Entry]:
    """Results of one model on one device, as many columns as fit."""
    # What did not end well is shown however narrow it is.
    others = any(e.status != Status.OK or describe_other_attempts(e.configuration) for e in entries)
    published = any(map(_published, entries))
    columns = (
        replace(c, rank=1) if others and c.name == "status" else c
        for c in _OF_TERMINAL
        if published or c.name != "published"
    )
    return Table(tuple(columns), tuple(entries), title).fitting(width)


_WINDOW = (
    _LABEL,
    Column[Entry]("Runs", lambda e: len(e.configuration.runs)),
    Column[Entry]("Window of the newest run", lambda e: e.run.window.text, right=False),
    Column[Entry]("Interval", lambda e: e.estimate and e.estimate.method.value, right=False),
)


def windows_table(report: Report, *, notes: bool = False) -> Table[Entry]:
    """Which iterations count, and where the interval comes from."""
    spread = Column[Entry]("Spread", lambda e: e.estimate and e.estimate.spread, percent)
    return Table((*_WINDOW, spread, _NOTES) if notes else _WINDOW, report.entries)


def speeds_table(report: Report) -> Table[Entry]:
    """Each configuration beside its cohort's reference."""
    compared = tuple(entry for entry in report.entries if entry.per_token)

    def per_iteration(entry: Entry) -> str:
        found = entry.speed.per_iteration if entry.speed else None
        if found:
            return format_ratio(found)
        other = entry.speed and entry.speed.per_device_token
        return "refused: other number of devices" if other else "refused: different work"

    def span(entry: Entry) -> str | None:
        found = entry.judged_time
        return f"{found.low:.3f} – {found.high:.3f}" if found and found.low and found.high else None

    def differences(entry: Entry) -> str:
        found = entry.speed.differences if entry.speed else ()
        return "; ".join(f"{d.what}: {d.reference} | {d.other}" for d in found)

    columns = (
        _LABEL,
        Column[Entry]("Against", lambda e: e.speed and e.speed.reference, right=False),
        Column[Entry]("Time an iteration", per_iteration, right=False),
        replace(_SPEED, right=False),
        Column[Entry]("95% interval", span),
        Column[Entry]("Tokens/s/device", lambda e: e.speed and e.speed.per_device, percent),
        Column[Entry]("What differs", differences, right=False),
    )
    return Table(columns, compared)


def arguments_table(report: Report, limit: int) -> Table[ArgumentDifference]:
    """Arguments that are not the same in all runs, a column for each row of the report."""

    def grouped(found: ArgumentDifference) -> str:
        """The commonest values, each with its number of rows."""
        counts = Counter(value or "not given" for value in found.values).most_common()
        texts = [f"{value} ({rows} rows)" for value, rows in counts[:_MAX_VALUES]]
        more = len(counts) - _MAX_VALUES
        return ", ".join(texts) + (f" and {more} other values" if more > 0 else "")

    def value_of(place: int) -> Column[ArgumentDifference]:
        label = report.entries[place].label
        return Column(label, lambda found: found.values[place] or None, right=False)

    name = Column[ArgumentDifference]("Argument", lambda found: found.name, right=False)
    values = [Column[ArgumentDifference]("Values", grouped, right=False)]
    if len(report.entries) <= _MAX_VALUES:
        values = [value_of(place) for place in range(len(report.entries))]
    return Table((name, *values), report.arguments[:limit])
