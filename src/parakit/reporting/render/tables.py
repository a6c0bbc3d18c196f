"""Define the tables of a report: each table's columns and rows, for any output format.

The results exist in three selections of the same columns. The page has most columns, Markdown has fewer,
and a terminal has those that fit, the most important first. `why` of a column is the tooltip of a dash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter

from parakit.artifacts.run import Status
from parakit.formatting.table import Column, Table
from parakit.formatting.units import DASH, bracketed, count, interval, loss, number, percent, size
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.report import ArgumentDifference, Report
from parakit.reporting.analyse.results import describe_other_attempts, write_row_notes
from parakit.reporting.analyse.statistics import (
    Estimate,
    TimeComparison,
    describe_ratio,
    describe_speed,
)

_MAX_VALUES = 12
"""Largest number of rows whose arguments get a column each; in larger reports values are counted."""
_MAX_DIFFERENCES = 8
"""Differences that a row of the speed table names; the table of arguments has all."""
_STYLES = {"ok": "green", "held": "green", "reference": "cyan", "": "dim", "running": "cyan"}


def format_ratio(comparison: TimeComparison) -> str:
    """Return a comparison for a table, such as `24% more`, `within noise (1.2% less)` or `1.56 times as fast`."""
    ratio = describe_ratio(comparison.ratio)
    if comparison.verdict.is_clear:
        return describe_speed(comparison.ratio) or ratio
    return f"{comparison.outcome} ({ratio})"


def format_speed(entry: Entry) -> str:
    """Return the verdict on a row's time per token; empty if the row is compared with no other row.

    If the numbers of devices differ, the verdict is about device time: `95% less, per device 30% more`.
    """
    speed = entry.speed
    if speed is None or speed.per_token is None:
        return ""
    if speed.per_device_token is None:
        return format_ratio(speed.per_token)
    per_device = format_ratio(speed.per_device_token)
    return f"{describe_ratio(speed.per_token.ratio)}, per device {per_device}"


def format_time(estimate: Estimate | None, shape: str = ".1f") -> str:
    """Return a time with its interval, such as `157.8 [140.5, 175.2]`; a dash without a time.

    Args:
        estimate: The time in milliseconds.
        shape: Format specification of each number.
    """
    if estimate is None:
        return DASH
    return bracketed(estimate.median, estimate.low, estimate.high, shape)


def _published_time(entry: Entry) -> tuple[float, str] | None:
    """Return the published milliseconds per iteration of the row's strategy and model, and their text."""
    figure = entry.figure
    if figure is None or figure.mean_iteration_ms is None or figure.model != entry.run.model:
        return None
    return figure.mean_iteration_ms, number(figure.mean_iteration_ms)


def _printed_throughput(entry: Entry) -> tuple[float, str] | None:
    """Return the TFLOP/s that Megatron printed, and their text; the text has its FLOPs over the kit's."""
    rate, factor = entry.rates.printed_tflops_per_device, entry.rates.printed_over_counted
    factor_text = f" (×{factor:.3g})" if factor else ""
    return None if rate is None else (rate, number(rate) + factor_text)


def _doubtful(
    value: Callable[[Entry], float | None], shape: Callable[[float], str]
) -> Callable[[Entry], tuple[float, str] | None]:
    """Return a column function that formats a rate, with a question mark if the run's model is uncertain."""

    def describe(entry: Entry) -> tuple[float, str] | None:
        rate = value(entry)
        mark = " ?" if entry.rates.model_doubt else ""
        return None if rate is None else (rate, shape(rate) + mark)

    return describe


_NO_MODEL = "no time, or no model that a rate follows from"


def _why_no_tokens(entry: Entry) -> str:
    """Return a phrase that names the quantities that are missing to compute tokens/s."""
    run = entry.run
    quantities = {
        "time": entry.time_ms,
        "global batch": run.global_batch_size,
        "sequence": run.seq_length,
    }
    missing = [name for name, value in quantities.items() if not value]
    return f"the log does not state its {' and '.join(missing)}" if missing else "not known"


def _why_no_mfu(entry: Entry) -> str:
    """Return why a row has no MFU."""
    if entry.run.device == "cpu":
        return "CPU ranks have no peak rate"
    return next((note for note in entry.rates.notes if note.startswith("no MFU")), _NO_MODEL)


def _why_not_compared(entry: Entry) -> str:
    """Return why a row's time per token is compared with no other."""
    if entry.speed:
        return entry.speed.caution or "not comparable"
    return "the reference, or nothing to compare it with"


def _parity_style(entry: Entry) -> str:
    """Return the colour of a verdict on losses."""
    if entry.parity.is_broken:
        return "bold red"
    return _STYLES.get(entry.parity.verdict, "yellow")


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
    "Time per token",
    lambda e: (e.per_token.ratio, format_speed(e)) if e.per_token else None,
    itemgetter(1),
    why=_why_not_compared,
)
_RATE = Column[Entry]("Tokens/s", lambda e: e.rates.tokens_per_second, number, why=_why_no_tokens)
_LOSS = Column[Entry](
    "Final loss", lambda e: e.final_loss, loss, why="no line has the loss of a whole step"
)
_PARITY = Column[Entry](
    "Parity",
    lambda e: e.parity.verdict or None,
    right=False,
    style=_parity_style,
    why="no other run must print the same losses",
)
_PARAMETERS = Column[Entry](
    "Parameters/rank", lambda e: e.largest_parameters, count, why="not printed"
)
_MEMORY = Column[Entry](
    "Peak memory", lambda e: e.peak_bytes, size, why="neither a ledger nor a memory line"
)
_SENT = Column[Entry]("Sent/iteration", lambda e: e.sent_bytes, size, why="no communication ledger")
_MFU = Column[Entry](
    "MFU", _doubtful(lambda e: e.rates.mfu, percent), itemgetter(1), why=_why_no_mfu
)
_PUBLISHED = Column[Entry](
    "Published ms", _published_time, itemgetter(1), why="nothing of this model and strategy"
)
_NOTES = Column[Entry]("Notes", write_row_notes, right=False)
_PARITY_OR_BLANK = replace(_PARITY, value=lambda e: e.parity.verdict)


def _count_devices(entry: Entry) -> int | None:
    """Return the number of devices or CPU ranks of a row; None if it is unknown."""
    return entry.spec.parallelism.world_size if entry.spec else entry.run.num_devices


_PAGE_COLUMNS = (
    _LABEL,
    _MODEL,
    _DEVICE,
    Column[Entry]("Devices", _count_devices, count, why="the log does not state it"),
    Column[Entry](
        "Batch", lambda e: e.run.global_batch_size, count, why="the log does not state it"
    ),
    Column[Entry]("Sequence", lambda e: e.run.seq_length, count, why="the log does not state it"),
    _STATUS,
    _TIME,
    _INTERVAL,
    Column[Entry](
        "Tokens/s/device",
        lambda e: e.rates.tokens_per_second_per_device,
        number,
        why=_why_no_tokens,
    ),
    _SPEED,
    _RATE,
    _LOSS,
    _PARITY,
    _PARAMETERS,
    _MEMORY,
    Column[Entry]("Device memory", lambda e: e.device_bytes, size, why="no reading of a device"),
    _SENT,
    Column[Entry](
        "TFLOP/s/device",
        _doubtful(lambda e: e.rates.model_tflops_per_device, number),
        itemgetter(1),
        why=_NO_MODEL,
    ),
    Column[Entry]("Printed TFLOP/s", _printed_throughput, itemgetter(1), why="no line has it"),
    _MFU,
    Column[Entry]("HFU", _doubtful(lambda e: e.rates.hfu, percent), itemgetter(1), why=_why_no_mfu),
    _PUBLISHED,
)


def _time_and_interval(entry: Entry) -> str:
    """Return a row's milliseconds per iteration with their 95% interval in brackets."""
    span = f" [{interval(*entry.interval)}]" if entry.interval else ""
    return number(entry.time_ms) + span


def _status_and_attempts(entry: Entry) -> str:
    """Return a row's status with its failed and running attempts: `ok (1 failed)`."""
    attempts = ", ".join(describe_other_attempts(entry.configuration)).replace("earlier ", "")
    return f"{entry.status} ({attempts})" if attempts else entry.status


_MARKDOWN_COLUMNS = (
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
_TERMINAL_COLUMNS = (
    replace(_LABEL, name="strategy", rank=0),
    replace(_STATUS, name="status", rank=5, value=_status_and_attempts),
    replace(_TIME, rank=1),
    replace(_INTERVAL, name="95%", rank=7, text=lambda ends: interval(*ends)),
    replace(_SPEED, name="time per token", rank=8, right=False),
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
    """Return the results table, with every column in which some row has a value."""
    table = Table(_PAGE_COLUMNS, report.entries)
    columns = []
    for index, column in enumerate(_PAGE_COLUMNS):
        texts = {cells[index] for cells in table.cells}
        if texts - {"", DASH}:
            columns.append(column)
    return replace(table, columns=tuple(columns))


def markdown_results_table(report: Report) -> Table[Entry]:
    """Return the results for Markdown, with notes."""
    return Table(_MARKDOWN_COLUMNS, report.entries)


def terminal_results_table(title: str, entries: Sequence[Entry], width: int) -> Table[Entry]:
    """Return the results table of one model on one device, with as many columns as fit into the terminal.

    Args:
        title: Heading of the table.
        entries: Rows of the model and device.
        width: Width of the terminal in characters.
    """
    has_published = any(map(_published_time, entries))
    has_other_status = any(
        entry.status != Status.OK or describe_other_attempts(entry.configuration)
        for entry in entries
    )
    columns = []
    for column in _TERMINAL_COLUMNS:
        if column.name == "published" and not has_published:
            continue
        # The status of a run that did not end well is shown in the narrowest terminal too.
        is_important_status = has_other_status and column.name == "status"
        columns.append(replace(column, rank=1) if is_important_status else column)
    return Table(tuple(columns), tuple(entries), title).fitting(width)


_WINDOW_COLUMNS = (
    _LABEL,
    Column[Entry]("Runs", lambda e: len(e.configuration.runs)),
    Column[Entry]("Window of the newest run", lambda e: e.run.window.text, right=False),
    Column[Entry]("Interval", lambda e: e.estimate and e.estimate.method.value, right=False),
)


def windows_table(report: Report, *, notes: bool = False) -> Table[Entry]:
    """Return a table with each row's measured iterations and the method of its confidence interval.

    Args:
        report: The report.
        notes: True adds the spread of single iterations and the row's notes.
    """
    spread = Column[Entry]("Spread", lambda e: e.estimate and e.estimate.spread, percent)
    columns = (*_WINDOW_COLUMNS, spread, _NOTES) if notes else _WINDOW_COLUMNS
    return Table(columns, report.entries)


def speeds_table(report: Report) -> Table[Entry]:
    """Return the table of speed comparisons: each row with its reference, the ratio of their times with its
    interval, and the other settings in which both differ.
    """
    compared = tuple(entry for entry in report.entries if entry.per_token)
    columns = (
        _LABEL,
        Column[Entry]("Against", lambda e: e.speed and e.speed.reference, right=False),
        Column[Entry]("Time per iteration", _iteration_time_text, right=False),
        replace(_SPEED, right=False),
        Column[Entry]("95% interval of the ratio", _ratio_interval_text),
        Column[Entry]("Tokens/s/device", lambda e: e.speed and e.speed.per_device, percent),
        Column[Entry]("What differs", _differences_text, right=False),
    )
    return Table(columns, compared)


def _iteration_time_text(entry: Entry) -> str:
    """Return the ratio of times per iteration, or why none is given."""
    if entry.speed and entry.speed.per_iteration:
        return format_ratio(entry.speed.per_iteration)
    if entry.speed and entry.speed.per_device_token:
        return "refused: other number of devices"
    return "refused: different work"


def _ratio_interval_text(entry: Entry) -> str | None:
    """Return the 95% interval of the ratio on which the verdict rests; None if it is unknown."""
    judged = entry.judged_time
    if judged is None or not judged.low or not judged.high:
        return None
    return f"{judged.low:.3f} – {judged.high:.3f}"


def _differences_text(entry: Entry) -> str:
    """Return a text with the first differences between a row and its reference, and the number of the others."""
    differences = entry.speed.differences if entry.speed else ()
    texts = [
        f"{difference.what}: {difference.reference} | {difference.other}"
        for difference in differences[:_MAX_DIFFERENCES]
    ]
    more = len(differences) - _MAX_DIFFERENCES
    if more > 0:
        texts.append(f"{more} more, see 'Arguments that differ'")
    return "; ".join(texts)


def arguments_table(report: Report, limit: int) -> Table[ArgumentDifference]:
    """Return the first arguments that differ, with a column of values per row of the report.

    In a report of more than _MAX_VALUES rows, a single column lists the values, each with the number of rows
    that have it.

    Args:
        report: The report.
        limit: Largest number of arguments.
    """
    name = Column[ArgumentDifference]("Argument", lambda argument: argument.name, right=False)
    values = [Column[ArgumentDifference]("Values", _count_values, right=False)]
    if len(report.entries) <= _MAX_VALUES:
        values = [_value_column(report, index) for index in range(len(report.entries))]
    return Table((name, *values), report.arguments[:limit])


def _count_values(argument: ArgumentDifference) -> str:
    """Return the most frequent values of an argument, each with its number of rows."""
    counts = Counter(value or "not given" for value in argument.values).most_common()
    texts = [f"{value} ({rows} rows)" for value, rows in counts[:_MAX_VALUES]]
    more = len(counts) - _MAX_VALUES
    return ", ".join(texts) + (f" and {more} other values" if more > 0 else "")


def _value_column(report: Report, index: int) -> Column[ArgumentDifference]:
    """Return the column with the values of one row of the report."""
    label = report.entries[index].label
    return Column(label, lambda argument: argument.values[index] or None, right=False)
