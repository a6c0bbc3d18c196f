"""Throughput over model size: a line for each backend and number of devices, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tools.launch.experiment.tables.overtaking import Swept, fastest
from tools.report.canvas import WIDTH_INCHES, Chart, colour, draw, grid
from tools.text.units import parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX*"


def draw_sweep(results: Sequence[Swept]) -> Chart | None:
    """The picture; None while nothing was measured."""
    if not any(result.estimate for result in results):
        return None
    text = (
        "Tokens a second over all devices at the median iteration, with 95% intervals; where a "
        "backend has several strategies on as many devices, its fastest."
    )
    return draw("sweep", "Throughput by model size", text, partial(_paint, results=results))


def _paint(figure: Figure, results: Sequence[Swept]) -> None:
    figure.set_size_inches(WIDTH_INCHES, 4.0)
    axes = figure.add_subplot()
    for place, ((devices, backend), line) in enumerate(fastest(results).items()):
        rates = [one.tokens_per_second or 0.0 for one in line]
        spans = [one.rate_interval or (rate, rate) for one, rate in zip(line, rates, strict=True)]
        axes.errorbar(
            [one.parameters for one in line],
            rates,
            yerr=[
                [rate - low for rate, (low, _) in zip(rates, spans, strict=True)],
                [high - rate for rate, (_, high) in zip(rates, spans, strict=True)],
            ],
            label=f"{backend}, {devices[0]} {devices[1]}",
            color=colour(place),
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=5,
            capsize=3,
            linewidth=1.4,
        )
    sizes = {one.parameters: one.cell.model for one in results if one.estimate}
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(
        list(sizes), [f"{name}\n{parameters(number)}" for number, name in sizes.items()]
    )
    axes.set_xticks([], minor=True)
    axes.set_ylabel("tokens a second")
    axes.legend()
    grid(axes)
