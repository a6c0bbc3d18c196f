"""What the page's curves show: iteration times, losses and what else iteration lines hold, as data.

`templates/plots.js` draws them in the browser as SVG: no library that a package index holds is small
enough (plotly's is 4.5 MB, Bokeh's 1 MB), and a canvas neither prints nor follows the page's colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tools.report.analyse.entry import Entry, loss_differences, names_of
from tools.report.analyse.parity import loss_points
from tools.report.analyse.report import Report
from tools.report.read.iterations import LOG_LINE, OTHER, IterationTable
from tools.report.read.runs import Run
from tools.report.render.thinning import extremes

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


def plots_of(report: Report) -> list[Plot]:
    """Every picture that at least two points of a row are known for, in the page's order."""
    entries = report.entries
    apart = _are_far_apart(entries)
    times = _plot("times", "Iteration time", "ms", entries, _times, clip=True)
    if apart:
        times = _plot("times", "Iteration time", "of its median", entries, _relative, clip=True)
    found = [
        times,
        _plot("losses", "Loss", "lm loss", entries, loss_points),
        _differences(entries),
        _plot("grad-norm", "Gradient norm", "grad norm", entries, _column("grad_norm"), clip=True),
        _plot("learning-rate", "Learning rate", "", entries, _column("learning_rate")),
        _plot("loss-scale", "Loss scale", "", entries, _column("loss_scale")),
    ]
    names = dict.fromkeys(name for e in entries for name in e.run.log.iterations.other_names)
    for place, name in enumerate(list(names)[:_MAX_OTHERS], start=1):
        found.append(_plot(f"other-{place}", name, name, entries, _column(OTHER + name)))
    return [plot for plot in found if plot is not None]


def as_script(plots: Sequence[Plot]) -> str:
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
    curves = [(place, curve(entry.run)) for place, entry in enumerate(entries)]
    curves = [(place, (x, y)) for place, (x, y) in curves if len(x) > 1]
    # What never changes needs no picture.
    if not any(np.any(y != y[0]) for _, (_, y) in curves) and name not in _ALWAYS:
        return None
    if not curves:
        return None
    labels = names_of(entries)
    alike = _coinciding(curves) if name in _ALIKE else {}
    curves = [(place, curve) for place, curve in curves if place not in alike]
    drawn = curves[:MAX_SERIES]
    others = Counter(alike.values())
    series = tuple(
        _series(labels[place] + _said(others[place]), place, entries[place].run, *curve)
        for place, curve in drawn
    )
    marks = _marks([entries[place] for place, _ in drawn], labels) if name == "times" else ()
    picked = f" The first {len(drawn)} of {len(curves)} rows." if len(curves) > len(drawn) else ""
    text = f"{_TEXTS.get(name, f'{title} by iteration, of the newest run of each row.')}{picked}"
    return Plot(name, title, text, unit, series, marks, clip, overlap=name in _ALIKE)


def _coinciding(curves: Sequence[tuple[int, Curve]]) -> dict[int, int]:
    """Places of curves that cannot be told from an earlier one in a picture, with that one's place."""
    levels = np.concatenate([y for _, (_, y) in curves])
    least = _DISTINCT * float(np.ptp(levels[np.isfinite(levels)]) if len(levels) else 0.0)
    shown: list[tuple[int, Curve]] = []
    found = {}
    for place, (x, y) in curves:
        same = (
            at
            for at, (u, v) in shown
            if np.array_equal(u, x) and float(np.max(np.abs(v - y))) <= least
        )
        if (earlier := next(same, None)) is None:
            shown.append((place, (x, y)))
        else:
            found[place] = earlier
    return found


def _said(others: int) -> str:
    return f" ({others} other{'s coincide' if others > 1 else ' coincides'})" if others else ""


def _are_far_apart(entries: Sequence[Entry]) -> bool:
    """Whether times on one axis would press some rows flat."""
    known = [entry.time_ms for entry in entries if entry.time_ms]
    return len(known) > 1 and max(known) > _FAR * min(known)


_DISTINCT = 0.004
"""Of a picture's height: curves that are closer lie on one another."""
_FAR = 4.0
_ALWAYS = ("times", "losses")
_ALIKE = ("losses", "learning-rate", "loss-scale")
_TEXTS = {
    "times": "Time of each iteration of the newest run of each row; without the first after a start.",
    "losses": "Training loss by iteration, of the newest run of each row.",
}


def _series(
    label: str, place: int, run: Run, x: NDArray[np.int64], y: NDArray[np.float64]
) -> Series:
    kept = extremes(y, MAX_POINTS)
    values = [float(f"{value:.7g}") for value in y[kept].tolist()]
    return Series(label, place, x[kept].tolist(), values, _log_lines(run.log.iterations, x[kept]))


def _log_lines(table: IterationTable, iterations: NDArray[np.int64]) -> list[int | None]:
    """The lines of the log that these iterations are printed in."""
    if not table.known(LOG_LINE).any():
        return []
    numbers = table.numbers
    places = np.minimum(np.searchsorted(numbers, iterations), len(numbers) - 1)
    lines = table.values(LOG_LINE)[places].tolist()
    own = (numbers[places] == iterations).tolist()
    return [int(line) if mine else None for line, mine in zip(lines, own, strict=True)]


def _marks(entries: Sequence[Entry], labels: Sequence[str]) -> tuple[Mark, ...]:
    several = len(labels) > 1
    found = [
        Mark(shift.iteration, f"{entry.label}: {shift.text}" if several else shift.text)
        for entry in entries
        for shift in entry.shifts
    ]
    resumed = [
        Mark(first, f"{entry.label} was resumed at iteration {first}")
        for entry in entries
        for first in entry.run.restarts
    ]
    return tuple(sorted([*found, *resumed][:MAX_MARKS], key=lambda mark: mark.x))


def _times(run: Run) -> Curve:
    table = run.log.iterations
    times = table.values("elapsed_ms")
    return _known(run, times, (times > 0) & ~table.known("first_of_start"))


def _relative(run: Run) -> Curve:
    numbers, times = _times(run)
    return numbers, times / np.median(times) if len(times) else times


def _column(name: str) -> Callable[[Run], Curve]:
    return lambda run: _known(run, run.log.iterations.values(name))


def _known(run: Run, values: NDArray[np.float64], usable: NDArray[np.bool_] | None = None) -> Curve:
    keep = np.isfinite(values) if usable is None else usable & np.isfinite(values)
    return run.log.iterations.numbers[keep], values[keep]


def _differences(entries: Sequence[Entry]) -> Plot | None:
    """Loss less its reference's, where parity was judged."""
    labels = names_of(entries)
    series = [
        _series(labels[place], place, judged, np.array(steps), np.array(units))
        for place, judged, steps, units in loss_differences(entries)
    ]
    if not series:
        return None
    text = "Loss less its reference's, in units of the last digit that Megatron prints."
    if len(series) > MAX_SERIES:
        text += f" The first {MAX_SERIES} of {len(series)} rows."
    unit = "units of the last digit"
    return Plot(
        "differences",
        "Loss against the reference",
        text,
        unit,
        tuple(series[:MAX_SERIES]),
        dots=True,
    )
