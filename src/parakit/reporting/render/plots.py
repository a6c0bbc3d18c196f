"""Build the data of the page's curves: iteration times, losses and the other numbers of iteration lines.

`templates/plots.js` draws the curves in the browser as SVG. Libraries in package indexes are too large for a
page (plotly's script has 4.5 MB, Bokeh's 1 MB), and a canvas neither prints sharply nor follows the page's
colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from parakit.logs import EXTRA_METRIC_PREFIX, LOG_LINE, Run
from parakit.reporting.analyse.entry import Entry, loss_differences
from parakit.reporting.analyse.parity import loss_points
from parakit.reporting.analyse.report import Report
from parakit.reporting.canvas import extreme_indexes

MAX_SERIES = 12
"""Largest number of rows per picture; more could not be told from one another."""
MAX_POINTS = 500
"""Largest number of points per curve: more than the page's width has pixels for."""
MAX_MARKS = 9
_MAX_PANELS = 4
"""Largest number of models with pictures of their own; the rows of further models have no curves."""
_MAX_EXTRA_METRICS = 6

Curve = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Iterations and values."""


@dataclass(frozen=True)
class Series:
    """Curve of one row."""

    label: str
    colour: int
    """Index of the row in the report, from which the colour follows."""
    x: list[int]
    y: list[float]
    log_lines: list[int | None]
    """Line of the run's log per point; None or empty if the point is in no log line (TensorBoard, a parent's log)."""
    means: list[float] = field(default_factory=list)
    """Mean of the values around each point, which is drawn bold over faint values; empty if values are drawn alone."""
    tokens: list[int] = field(default_factory=list)
    """Tokens trained until each point; empty if batch or sequence length are unknown, or not asked for."""
    seconds: list[float] = field(default_factory=list)
    """Sum of the iteration times until each point; empty if a time is unknown, or not asked for."""


@dataclass(frozen=True)
class Mark:
    """Numbered mark on the axis of iterations."""

    x: int
    text: str


@dataclass(frozen=True)
class Plot:
    """Picture with its curves."""

    name: str
    """Distinct name of the picture: the quantity, with a number from the second model on."""
    quantity: str
    """Name of the quantity, such as `losses`; pictures of several models share it."""
    title: str
    text: str
    """Description, with the number of rows; it is the picture's text alternative too."""
    unit: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    clip: bool = False
    """True draws values far beyond the others as arrows at the edge."""
    overlap: bool = False
    """True draws later curves thinner and dashed, because curves may lie on one another."""
    dots: bool = False
    """True draws points without a line between them."""
    coinciding: tuple[Series, ...] = ()
    """Curves that coincide with a curve of `series` by iteration, and are drawn over time only."""


def build_plots(report: Report) -> list[Plot]:
    """Return the line plots of all metrics, in the order of the page.

    A metric without a plot has no row with two or more points, or never changes. At most `_MAX_EXTRA_METRICS`
    metrics that the kit does not know are plotted.
    """
    entries = report.entries
    plots = [
        *_build_panels(entries, _build_time_plot),
        *build_loss_plots(entries),
        *_build_quantity_plots("grad-norm", "Gradient norm", "grad norm", entries),
        *_build_quantity_plots("learning-rate", "Learning rate", "", entries),
        *_build_quantity_plots("loss-scale", "Loss scale", "", entries),
    ]
    # A dictionary keeps the order in which the logs print the metrics.
    extra_metrics: dict[str, None] = {}
    for entry in entries:
        extra_metrics |= dict.fromkeys(entry.run.log.iterations.other_names)
    for index, metric in enumerate(list(extra_metrics)[:_MAX_EXTRA_METRICS], start=1):
        column = EXTRA_METRIC_PREFIX + metric
        plots += _build_quantity_plots(f"other-{index}", metric, metric, entries, column)
    return plots


def build_loss_plots(entries: Sequence[Entry], *, merges: bool = True) -> list[Plot]:
    """Return the plots of the losses, and of the differences from the references, one per model.

    A plot without curves is left out. The page and the chart `loss.svg` both draw these plots.

    Args:
        entries: Rows of the report.
        merges: True draws curves that coincide as one curve, labelled with their number.
    """

    def build_losses(entries: Sequence[Entry], indexes: Sequence[int]) -> Plot | None:
        return _build_plot(
            "losses", "Loss", "lm loss", entries, indexes, loss_points, merges=merges
        )

    return [
        *_build_panels(entries, build_losses),
        *_build_panels(entries, _build_difference_plot),
    ]


def _build_panels(
    entries: Sequence[Entry], build: Callable[[Sequence[Entry], Sequence[int]], Plot | None]
) -> list[Plot]:
    """Return one plot per model, because the axis of one model would flatten the curves of another.

    The titles name the models if the report has several. At most `_MAX_PANELS` models have a plot; the text of
    the last plot has the number of the others.

    Args:
        entries: Rows of the report.
        build: Function that returns the plot of the rows at the given indexes, or None without curves.
    """
    indexes_by_model: dict[str, list[int]] = {}
    for index, entry in enumerate(entries):
        indexes_by_model.setdefault(entry.run.model, []).append(index)
    plots: list[Plot] = []
    num_left_out = 0
    for model, indexes in indexes_by_model.items():
        plot = build(entries, indexes)
        if plot is None:
            continue
        if len(plots) == _MAX_PANELS:
            num_left_out += 1
            continue
        if plots:
            plot = replace(plot, name=f"{plot.name}-{len(plots) + 1}")
        if len(indexes_by_model) > 1:
            plot = replace(plot, title=f"{plot.title}, {model or 'model not named'}")
        plots.append(plot)
    if num_left_out:
        text = f"{plots[-1].text} {num_left_out} more models have no picture."
        plots[-1] = replace(plots[-1], text=text)
    return plots


def _build_quantity_plots(
    name: str, title: str, unit: str, entries: Sequence[Entry], column: str = ""
) -> list[Plot]:
    """Return the plots of one quantity of the log lines, one per model.

    Args:
        name: Name of the picture.
        title: Title.
        unit: Unit of the values.
        entries: Rows of the report.
        column: Column of the iterations; empty if it is the picture's name with underscores.
    """
    curve = _column_reader(column or name.replace("-", "_"))

    def build(entries: Sequence[Entry], indexes: Sequence[int]) -> Plot | None:
        clip = name == "grad-norm"
        return _build_plot(name, title, unit, entries, indexes, curve, clip=clip)

    return _build_panels(entries, build)


def _build_time_plot(entries: Sequence[Entry], indexes: Sequence[int]) -> Plot | None:
    """Return the plot of the iteration times of the rows at the given indexes; None without times."""
    medians = [entries[index].time_ms for index in indexes]
    known = [median for median in medians if median]
    # If times differ widely, each row is drawn relative to its median, or one axis would flatten some rows.
    is_relative = len(known) > 1 and max(known) > _FAR * min(known)
    unit = "of its median" if is_relative else "ms"
    reader = _time_reader(is_relative=is_relative)
    return _build_plot("times", "Iteration time", unit, entries, indexes, reader, clip=True)


def encode_plots(plots: Sequence[Plot]) -> str:
    """Return the plots as JSON for a script element; characters that could end the element are escaped."""
    text = msgspec.json.encode({plot.name: plot for plot in plots}).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _build_plot(
    name: str,
    title: str,
    unit: str,
    entries: Sequence[Entry],
    indexes: Sequence[int],
    curve: Callable[[Run], Curve],
    *,
    clip: bool = False,
    merges: bool = True,
) -> Plot | None:
    """Return the plot of one quantity; None if no row has two points, or if the quantity never changes.

    Args:
        name: Name of the picture.
        title: Title.
        unit: Unit of the values.
        entries: Rows of the report.
        indexes: Indexes of the rows that may have a curve.
        curve: Function that reads a run's iterations and values.
        clip: True draws values far beyond the others as arrows.
        merges: False draws every curve, also those that coincide.
    """
    curves: dict[int, Curve] = {}
    for index in indexes:
        iterations, values = curve(entries[index].run)
        if len(iterations) > 1:
            curves[index] = iterations, values
    if not curves:
        return None
    any_value_changes = any(np.any(values != values[0]) for _, values in curves.values())
    if not any_value_changes and name not in _ALWAYS_DRAWN:
        return None
    may_coincide = name in _MAY_COINCIDE
    coinciding = _find_coinciding_curves(curves) if merges and may_coincide else {}
    distinct = [index for index in curves if index not in coinciding]
    drawn = distinct[:MAX_SERIES]
    text = _TEXTS.get(name, f"{title} by iteration, of the newest run of each row.")
    if len(distinct) > len(drawn):
        text += f" The first {len(drawn)} of {len(distinct)} rows."
    # The title names the model, so the labels need not.
    labels = _label_merged_curves([entry.label for entry in entries], coinciding)

    def build_series(index: int) -> Series:
        run = entries[index].run
        iterations, values = curves[index]
        series = _build_series(labels[index], index, run, iterations, values)
        if name != "losses":
            return series
        return _add_progress(_add_means(series, iterations, values), run)

    series_that_coincide: list[Series] = []
    if name == "losses":
        # Runs with equal losses by iteration may need different times for them.
        num_free = MAX_SERIES - len(drawn)
        series_that_coincide = [build_series(index) for index in list(coinciding)[:num_free]]
    marks = _list_marks(name, [entries[index] for index in drawn], names_rows=len(indexes) > 1)
    return Plot(
        name=name,
        quantity=name,
        title=title,
        text=text,
        unit=unit,
        series=tuple(build_series(index) for index in drawn),
        marks=marks,
        clip=clip,
        overlap=may_coincide,
        coinciding=tuple(series_that_coincide),
    )


def _label_merged_curves(labels: Sequence[str], coinciding: Mapping[int, int]) -> list[str]:
    """Return the labels of the rows, with the number of other curves that are drawn as the row's curve.

    Args:
        labels: Label per row.
        coinciding: Index of the earlier row that is drawn, by the index of a row whose curve coincides with it.
    """
    num_coinciding = Counter(coinciding.values())
    merged_labels = []
    for index, label in enumerate(labels):
        more = num_coinciding[index]
        suffix = ""
        if more:
            suffix = f" ({more} {'others coincide' if more > 1 else 'other coincides'})"
        merged_labels.append(label + suffix)
    return merged_labels


def _list_marks(name: str, rows: Sequence[Entry], names_rows: bool) -> tuple[Mark, ...]:
    """Return at most MAX_MARKS marks of a picture, ordered by iteration: changes within runs, and resumptions.

    Args:
        name: Name of the picture. Only the picture of times marks changes, and only _WITH_RESTARTS mark resumptions.
        rows: Rows that are drawn.
        names_rows: True puts the row's label before the text of a change.
    """
    marks: list[Mark] = []
    if name == "times":
        for row in rows:
            prefix = f"{row.label}: " if names_rows else ""
            marks += [
                Mark(change.iteration, f"{prefix}{change.text}")
                for change in row.changes_within_run
            ]
    if name in _WITH_RESTARTS:
        for row in rows:
            marks += [
                Mark(iteration, f"{row.label} was resumed at iteration {iteration}")
                for iteration in row.run.restarts
            ]
    return tuple(sorted(marks[:MAX_MARKS], key=lambda mark: mark.x))


def _find_coinciding_curves(curves: Mapping[int, Curve]) -> dict[int, int]:
    """Return which curves look the same as an earlier curve: the index of the earlier curve by the curve's index."""
    all_values = np.concatenate([values for _, values in curves.values()])
    value_range = float(np.ptp(all_values[np.isfinite(all_values)])) if len(all_values) else 0.0
    visible = _MIN_DISTANCE * value_range
    shown: dict[int, Curve] = {}
    earlier_by_index = {}
    for index, (iterations, values) in curves.items():
        for earlier, (earlier_iterations, earlier_values) in shown.items():
            if not np.array_equal(earlier_iterations, iterations):
                continue
            if float(np.max(np.abs(earlier_values - values))) <= visible:
                earlier_by_index[index] = earlier
                break
        else:
            shown[index] = iterations, values
    return earlier_by_index


_MIN_DISTANCE = 0.004
"""Fraction of a picture's height; curves that are closer count as coinciding."""
_FAR = 4.0
"""Ratio of two rows' times from which on times are drawn relative to their medians."""
_ALWAYS_DRAWN = ("times", "losses")
_WITH_RESTARTS = ("times", "losses")
"""Plots that mark where a run was resumed."""
_MAY_COINCIDE = ("losses", "learning-rate", "loss-scale")
_TEXTS = {
    "times": "Time of each iteration of the newest run of each row, without the first one after a start and"
    " without averages over several.",
    "losses": "Training loss by iteration, of the newest run of each row.",
}


def _build_series(
    label: str, index: int, run: Run, x: NDArray[np.int64], y: NDArray[np.float64]
) -> Series:
    """Return a curve of at most MAX_POINTS points. Each point has the number of its line in the log.

    The extreme values are among the points. The line number is None if the log does not have the iteration.
    """
    indexes = extreme_indexes(y, MAX_POINTS)
    values = [float(f"{value:.7g}") for value in y[indexes].tolist()]
    iterations, table = x[indexes], run.log.iterations
    log_lines: list[int | None] = []
    if table.known(LOG_LINE).any():
        numbers = table.numbers
        places = np.minimum(np.searchsorted(numbers, iterations), len(numbers) - 1)
        lines, is_in_log = table.values(LOG_LINE)[places].tolist(), numbers[places] == iterations
        log_lines = [
            int(line) if is_known else None
            for line, is_known in zip(lines, is_in_log.tolist(), strict=True)
        ]
    return Series(label, index, iterations.tolist(), values, log_lines)


_MIN_SMOOTHED = 60
"""Points from which on a loss curve has a mean."""
_PARTS_OF_CURVE = 25
"""Number of windows of the mean in a curve."""


def _add_means(series: Series, x: NDArray[np.int64], y: NDArray[np.float64]) -> Series:
    """Return the curve with a moving mean at each of its points. A short curve is returned unchanged.

    The mean is over all values around the point, also over those that the curve does not show.

    Args:
        series: The curve as it is drawn.
        x: All iterations, some of which the curve shows.
        y: Values of all iterations.
    """
    if len(y) < _MIN_SMOOTHED:
        return series
    half_window = max(2, len(y) // _PARTS_OF_CURVE // 2)
    centres = np.arange(len(y))
    # At the ends the window gets narrower on both sides, so that it stays symmetric.
    distance_to_end = np.minimum(centres, len(y) - 1 - centres)
    reach = np.minimum(half_window, distance_to_end)
    # A difference of two cumulative sums is the sum over a window.
    cumulative_sums = np.concatenate([[0.0], np.cumsum(y)])
    window_sums = cumulative_sums[centres + reach + 1] - cumulative_sums[centres - reach]
    means = window_sums / (2 * reach + 1)
    shown_means = means[np.searchsorted(x, series.x)]
    return replace(series, means=[float(f"{mean:.7g}") for mean in shown_means.tolist()])


def _add_progress(series: Series, run: Run) -> Series:
    """Return the curve with the tokens and the seconds of training until each point, as far as the log has them."""
    return replace(
        series, tokens=_tokens_until(series.x, run), seconds=_seconds_until(series.x, run)
    )


def _tokens_until(iterations: Sequence[int], run: Run) -> list[int]:
    """Return the tokens that a run has trained on after each of these iterations.

    The list is empty if the batch size or the sequence length is unknown, or if the batch size changes.
    """
    table = run.log.iterations
    batch, sequence = run.global_batch_size, run.seq_length
    known_batches = table.values("global_batch_size")[table.known("global_batch_size")]
    has_constant_batch = bool(np.all(known_batches == batch))
    if not batch or not sequence or not has_constant_batch:
        return []
    return [iteration * batch * sequence for iteration in iterations]


def _seconds_until(iterations: Sequence[int], run: Run) -> list[float]:
    """Return the seconds that a run has trained at the end of each of these iterations.

    The list is empty if the log does not begin with iteration 1, lacks an iteration or lacks the time of one.
    """
    table = run.log.iterations
    # Without the first iterations, or with a gap, a sum would be the time of a part of the run.
    every_iteration = np.arange(1, len(table.numbers) + 1)
    if not len(every_iteration) or not np.array_equal(table.numbers, every_iteration):
        return []
    milliseconds = table.values("elapsed_ms")
    is_timed = table.known("elapsed_ms") & np.isfinite(milliseconds)
    if not is_timed.all():
        return []
    seconds_at_end = np.cumsum(milliseconds) / _MS_PER_SECOND
    # Iteration 1 has index 0.
    return [float(f"{seconds_at_end[iteration - 1]:.7g}") for iteration in iterations]


_MS_PER_SECOND = 1e3


def _column_reader(name: str) -> Callable[[Run], Curve]:
    """Return a function that reads a column of a run's iterations as a curve, without values that are not finite."""

    def curve(run: Run) -> Curve:
        values = run.log.iterations.values(name)
        keep = np.isfinite(values)
        return run.log.iterations.numbers[keep], values[keep]

    return curve


def _time_reader(*, is_relative: bool) -> Callable[[Run], Curve]:
    """Return a function that reads a run's iteration times as a curve.

    The curve has milliseconds, or if `is_relative` multiples of their median. Averages over several iterations and
    the first iteration after a start are left out.
    """

    def curve(run: Run) -> Curve:
        table = run.log.iterations
        milliseconds = table.values("elapsed_ms")
        is_single = ~table.known("first_of_start") & ~table.known("averaged")
        keep = (milliseconds > 0) & is_single & np.isfinite(milliseconds)
        usual = np.median(milliseconds[keep]) if is_relative and keep.any() else 1.0
        return table.numbers[keep], milliseconds[keep] / usual

    return curve


def _build_difference_plot(entries: Sequence[Entry], indexes: Sequence[int]) -> Plot | None:
    """Return the plot of the losses minus those of the references; None if all losses are equal.

    Args:
        entries: Rows of the report.
        indexes: Indexes of the rows that may have a curve.
    """
    # The last digit shows how equal losses are; different losses are shown by their difference.
    is_broken = any(entries[index].parity.is_broken for index in indexes)
    series: list[Series] = []
    for difference in loss_differences(entries):
        if difference.index in indexes:
            iterations = np.array(difference.iterations)
            values = np.array(difference.losses if is_broken else difference.units)
            series.append(
                _build_series(
                    entries[difference.index].label,
                    difference.index,
                    difference.run,
                    iterations,
                    values,
                )
            )
    if not any(any(curve.y) for curve in series):
        return None
    text = "Loss minus the reference's loss, in units of the last digit that Megatron prints."
    unit = "units of the last digit"
    if is_broken:
        text, unit = "Loss minus the reference's loss.", "lm loss"
    if len(series) > MAX_SERIES:
        text += f" The first {MAX_SERIES} of {len(series)} rows."
    return Plot(
        name="differences",
        quantity="differences",
        title="Loss against the reference",
        text=text,
        unit=unit,
        series=tuple(series[:MAX_SERIES]),
        dots=True,
    )
