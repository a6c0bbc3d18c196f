"""Charts as SVG: drawn by matplotlib, which is imported only here and only when drawing."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.report.configurations import Configuration
from tools.report.parity import loss_curve
from tools.report.report_data import Entry, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stands for "the text's colour": the page makes it currentColor, a file on its own dark grey.
INK, INK_ALONE, PAPER = "#010203", "#24292f", "#fdfefd"
COLOURS = (  # Okabe and Ito's, told apart by colour-blind readers, on white as on black.
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#8c6bb1", "#7f7f7f"),
)
MAX_CURVES = 8
MAX_DISTRIBUTIONS = 40
_WIDTH_INCHES = 7.2


@dataclass(frozen=True)
class Chart:
    """One picture."""

    name: str
    title: str
    """Says what is to be seen; also the text for those who cannot see it."""
    svg: str
    """Complete file, dark on white."""
    inline: str
    """For the page: the text's own colour on a transparent ground."""


def draw_charts(report: Report) -> list[Chart]:
    """Draw every chart that the runs have data for."""
    timed = [entry for entry in report.entries if entry.configuration.estimate]
    curved = [entry for entry in report.entries if len(loss_curve(entry.run)) > 1]
    charts = []
    if timed:
        charts.append(_draw("iteration-time", "Iteration time", _draw_times, timed))
    if curved:
        charts.append(_draw("loss", "Loss", _draw_losses, curved))
    return charts


def _draw(
    name: str,
    title: str,
    painter: Callable[[Figure, Sequence[Entry]], None],
    entries: Sequence[Entry],
) -> Chart:
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "figure.facecolor": PAPER,
        "axes.facecolor": "none",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(_WIDTH_INCHES, 3.2), layout="constrained")
        painter(figure, entries)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    body = svg[svg.index("<svg") :]
    alone = svg.replace(INK, INK_ALONE).replace(PAPER, "#ffffff")
    inline = body.replace(INK, "currentColor").replace(f"fill: {PAPER}", "fill: none")
    return Chart(name, title, alone, inline)


def _draw_times(figure: Figure, entries: Sequence[Entry]) -> None:
    shown = list(entries)[:MAX_DISTRIBUTIONS]
    figure.set_size_inches(_WIDTH_INCHES, 0.9 + 0.42 * len(shown))
    axes = figure.add_subplot()
    for place, entry in enumerate(shown):
        _draw_distribution(axes, place, entry.configuration, COLOURS[place % len(COLOURS)])
    axes.set_yticks(range(len(shown)), [_name(entry, shown) for entry in shown])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.margins(y=0.5 / max(1, len(shown)))
    axes.set_xlabel("ms an iteration (dots: iterations, bar: median with 95% interval)")
    axes.grid(axis="x", color=INK, alpha=0.15, linewidth=0.6)


def _draw_distribution(axes: Axes, place: int, row: Configuration, colour: str) -> None:
    samples = [ms for run in row.runs for ms in run.window.samples_ms]
    samples = samples[:: max(1, len(samples) // 300)]
    # Spread by golden ratio: even, and the same in every drawing.
    heights = [place + 0.5 * ((k * 0.618034) % 1 - 0.5) for k in range(len(samples))]
    axes.scatter(samples, heights, s=7, color=colour, alpha=0.35, linewidths=0)
    found = row.estimate
    assert found is not None
    axes.vlines(found.median, place - 0.36, place + 0.36, color=INK, linewidth=1.8)
    if found.low is not None and found.high is not None:
        axes.hlines(place, found.low, found.high, color=INK, linewidth=4, alpha=0.75)


def _draw_losses(figure: Figure, entries: Sequence[Entry]) -> None:
    axes = figure.add_subplot()
    shown = list(entries)[:MAX_CURVES]
    for place, entry in enumerate(shown):
        curve = loss_curve(entry.run)
        steps = sorted(curve)
        steps = steps[:: max(1, len(steps) // 1000)]
        # Equal curves lie on one another: later ones are dashed and thinner, so that all show.
        axes.plot(
            steps,
            [curve[step] for step in steps],
            color=COLOURS[place % len(COLOURS)],
            linewidth=3.4 - 2.4 * place / max(1, len(shown) - 1),
            linestyle=(0, (4, place)) if place else "-",
            label=_name(entry, shown),
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("lm loss")
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    figure.legend(loc="outside right upper", handlelength=2.6)


def _name(entry: Entry, shown: Sequence[Entry]) -> str:
    """The label, with the model where several are shown; `$` would start mathematics."""
    models = {other.row.model for other in shown}
    text = f"{entry.row.model} {entry.label}" if len(models) > 1 else entry.label
    text = text if len(text) <= 32 else text[:31] + "…"
    return text.replace("$", r"\$")
