"""What the page's curves show: iteration times, losses and what else iteration lines hold, as data.

`templates/plots.js` draws them in the browser as SVG: no library that a package index holds is small
enough (plotly's is 4.5 MB, Bokeh's 1 MB), and a canvas neither prints nor follows the page's colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from parakit.logs import EXTRA_METRIC_PREFIX, LOG_LINE, Run
from parakit.reporting.analyse.entry import Entry, entry_names, loss_differences
from parakit.reporting.analyse.parity import loss_points
from parakit.reporting.analyse.report import Report
from parakit.reporting.canvas import extreme_indexes

MAX_SERIES = 12
"""Rows that one picture draws; more cannot be told apart."""
MAX_POINTS = 500
"""Of one curve: more than the page has pixels for a stretch's least and largest."""
MAX_MARKS = 9
_MAX_OTHERS = 6

Curve = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True)
class Series:
    """One curve."""

    label: str
    colour: int
    """Place of its row in the report."""
    x: list[int]
    y: list[float]
    log_lines: list[int | None]
    """Where each point stands in the run's log; empty where none does (TensorBoard, a parent's log)."""


@dataclass(frozen=True)
class Mark:
    """Something dated on the axis of iterations."""

    x: int
    text: str


@dataclass(frozen=True)
class Plot:
    """One picture."""

    name: str
    title: str
    text: str
    """What is drawn, and of how many rows; the picture's alternative text too."""
    unit: str
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    clip: bool = False
    """Whether values far beyond the others stand as arrows at the edge."""
    overlap: bool = False
    """Whether curves are expected to lie on one another: later ones are thinner and dashed."""
    dots: bool = False
    """Whether points are joined by nothing."""


def build_plots(report: Report) -> list[Plot]:
    """Every picture that at least two points of a row are known for, in the page's order."""
    entries = report.entries
    known = [entry.time_ms for entry in entries if entry.time_ms]
    # On one axis some rows would be pressed flat.
    apart = len(known) > 1 and max(known) > _FAR * min(known)

    def times(run: Run) -> Curve:
        table = run.log.iterations
        each = table.values("elapsed_ms")
        whole = ~table.known("first_of_start") & ~table.known("averaged")
        keep = (each > 0) & whole & np.isfinite(each)
        usual = np.median(each[keep]) if apart and keep.any() else 1.0
        return table.numbers[keep], each[keep] / usual

    unit = "of its median" if apart else "ms"
    found = [
        _plot("times", "Iteration time", unit, entries, times, clip=True),
        _plot("losses", "Loss", "lm loss", entries, loss_points),
        _differences(entries),
        _plot("grad-norm", "Gradient norm", "grad norm", entries, _column("grad_norm"), clip=True),
        _plot("learning-rate", "Learning rate", "", entries, _column("learning_rate")),
        _plot("loss-scale", "Loss scale", "", entries, _column("loss_scale")),
    ]
    names = dict.fromkeys(name for e in entries for name in e.run.log.iterations.other_names)
    for place, name in enumerate(list(names)[:_MAX_OTHERS], start=1):
        found.append(
            _plot(f"other-{place}", name, name, entries, _column(EXTRA_METRIC_PREFIX + name))
        )
    return [plot for plot in found if plot is not None]


def encode_plots(plots: Sequence[Plot]) -> str:
    """The plots' data for a script element: nothing in it can end the element."""
    text = msgspec.json.encode({plot.name: plot for plot in plots}).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plot(
    name: str,
    title: str,
    unit: str,
    entries: Sequence[Entry],
    curve: Callable[[Run], Curve],
    *,
    clip: bool = False,
) -> Plot | None:
    curves = {place: curve(entry.run) for place, entry in enumerate(entries)}
    curves = {place: (x, y) for place, (x, y) in curves.items() if len(x) > 1}
    # What never changes needs no picture.
    changes = name in _ALWAYS or any(np.any(y != y[0]) for _, y in curves.values())
    if not curves or not changes:
        return None
    labels = entry_names(entries)
    alike = _coinciding(curves) if name in _ALIKE else {}
    shown = [place for place in curves if place not in alike]
    drawn, others = shown[:MAX_SERIES], Counter(alike.values())
    series = []
    for place in drawn:
        more = others[place]
        said = f" ({more} other{'s coincide' if more > 1 else ' coincides'})" if more else ""
        series.append(_series(labels[place] + said, place, entries[place].run, *curves[place]))
    marks: list[Mark] = []
    if name == "times":
        rows = [(entries[place].label, entries[place]) for place in drawn]
        several = len(labels) > 1
        marks = [
            Mark(shift.iteration, f"{label}: {shift.text}" if several else shift.text)
            for label, row in rows
            for shift in row.changes_within_run
        ]
        resumed = ((label, at) for label, row in rows for at in row.run.restarts)
        marks += [Mark(at, f"{label} was resumed at iteration {at}") for label, at in resumed]
        marks = sorted(marks[:MAX_MARKS], key=lambda mark: mark.x)
    picked = f" The first {len(drawn)} of {len(shown)} rows." if len(shown) > len(drawn) else ""
    text = f"{_TEXTS.get(name, f'{title} by iteration, of the newest run of each row.')}{picked}"
    overlap = name in _ALIKE
    return Plot(name, title, text, unit, tuple(series), tuple(marks), clip, overlap)


def _coinciding(curves: Mapping[int, Curve]) -> dict[int, int]:
    """Places of curves that cannot be told from an earlier one in a picture, with that one's place."""
    levels = np.concatenate([y for _, y in curves.values()])
    least = _DISTINCT * float(np.ptp(levels[np.isfinite(levels)]) if len(levels) else 0.0)
    shown: dict[int, Curve] = {}
    found = {}
    for place, (x, y) in curves.items():
        for earlier, (u, v) in shown.items():
            if np.array_equal(u, x) and float(np.max(np.abs(v - y))) <= least:
                found[place] = earlier
                break
        else:
            shown[place] = x, y
    return found


_DISTINCT = 0.004
"""Of a picture's height: curves that are closer lie on one another."""
_FAR = 4.0
_ALWAYS = ("times", "losses")
_ALIKE = ("losses", "learning-rate", "loss-scale")
_TEXTS = {
    "times": "Time of each iteration of the newest run of each row; without the first after a start and"
    " means of several.",
    "losses": "Training loss by iteration, of the newest run of each row.",
}


def _series(
    label: str, place: int, run: Run, x: NDArray[np.int64], y: NDArray[np.float64]
) -> Series:
    kept = extreme_indexes(y, MAX_POINTS)
    values = [float(f"{value:.7g}") for value in y[kept].tolist()]
    iterations, table = x[kept], run.log.iterations
    log_lines: list[int | None] = []
    if table.known(LOG_LINE).any():
        numbers = table.numbers
        places = np.minimum(np.searchsorted(numbers, iterations), len(numbers) - 1)
        lines, own = table.values(LOG_LINE)[places].tolist(), numbers[places] == iterations
        log_lines = [int(n) if mine else None for n, mine in zip(lines, own.tolist(), strict=True)]
    return Series(label, place, iterations.tolist(), values, log_lines)


def _column(name: str) -> Callable[[Run], Curve]:
    def curve(run: Run) -> Curve:
        values = run.log.iterations.values(name)
        keep = np.isfinite(values)
        return run.log.iterations.numbers[keep], values[keep]

    return curve


def _differences(entries: Sequence[Entry]) -> Plot | None:
    """Loss less its reference's, where parity was judged."""
    labels = entry_names(entries)
    series = tuple(
        _series(labels[place], place, judged, np.array(steps), np.array(units))
        for place, judged, steps, units in loss_differences(entries)
    )
    if not series:
        return None
    text = "Loss less its reference's, in units of the last digit that Megatron prints."
    if len(series) > MAX_SERIES:
        text += f" The first {MAX_SERIES} of {len(series)} rows."
    title, unit = "Loss against the reference", "units of the last digit"
    return Plot("differences", title, text, unit, series[:MAX_SERIES], dots=True)
