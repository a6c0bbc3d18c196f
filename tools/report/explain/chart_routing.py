"""The picture of routing: experts × iterations, and the router's losses below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tools.report.canvas import WIDTH_INCHES, colour, grid
from tools.report.explain.routing import IterationRouting, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LAYERS = 4
_CURVES: dict[str, Callable[[IterationRouting], float | None]] = {
    "load-balancing loss (1 is even)": lambda found: found.load_balancing_loss,
    "z-loss": lambda found: found.z_loss,
    "entropy, nats": lambda found: found.entropy_nats,
}
_HIGHEST = 2.0
"""Shares from here on have one colour."""


def draw_routing(figure: Figure, iterations: Sequence[IterationRouting]) -> None:
    """Fill a figure: a heat map for each of up to four layers, and the losses over time."""
    layers = chosen_layers(tuple(iterations[0].tokens))
    figure.set_size_inches(WIDTH_INCHES, 1.15 * len(layers) + 2.0)
    # Constrained layout does not see that the curves' labels reach further left than the maps'.
    figure.set_layout_engine("constrained", rect=(0.03, 0, 0.97, 1))
    places = figure.add_gridspec(
        len(layers) + 1, len(_CURVES), height_ratios=[*(1.0 for _ in layers), 1.3]
    )
    maps = [figure.add_subplot(places[row, :]) for row in range(len(layers))]
    for axes, layer in zip(maps, layers, strict=True):
        picture = _draw_layer(axes, iterations, layer)
        axes.tick_params(labelbottom=axes is maps[-1])
    bar = figure.colorbar(picture, ax=maps, extend="max", pad=0.02)
    bar.set_label("tokens over even share", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    for column, (name, figures) in enumerate(_CURVES.items()):
        axes = figure.add_subplot(places[len(layers), column])
        _draw_curve(axes, iterations, name, figures)


def chosen_layers(layers: Sequence[int]) -> list[int]:
    """All, or of many the first, the last and some between."""
    if len(layers) <= MAX_LAYERS:
        return list(layers)
    places = [round(k * (len(layers) - 1) / (MAX_LAYERS - 1)) for k in range(MAX_LAYERS)]
    return [layers[place] for place in places]


def _draw_layer(axes: Axes, iterations: Sequence[IterationRouting], layer: int) -> Any:
    from matplotlib.colors import TwoSlopeNorm

    by_expert = list(zip(*shares(iterations, layer), strict=True))
    first, last = iterations[0].iteration, iterations[-1].iteration
    half = (last - first) / max(1, len(iterations) - 1) / 2 or 0.5
    picture = axes.imshow(
        by_expert,
        aspect="auto",
        interpolation="nearest",
        cmap="PuOr_r",
        norm=TwoSlopeNorm(1.0, 0.0, _HIGHEST),
        extent=(first - half, last + half, len(by_expert) - 0.5, -0.5),
    )
    axes.set_ylabel(f"layer {layer}\nexpert", fontsize=8)
    axes.set_yticks([0, len(by_expert) - 1])
    axes.tick_params(labelsize=8, length=0)
    return picture


def _draw_curve(
    axes: Axes,
    iterations: Sequence[IterationRouting],
    name: str,
    figure: Callable[[IterationRouting], float | None],
) -> None:
    known = [(i.iteration, value) for i in iterations if (value := figure(i)) is not None]
    if known:
        axes.plot(*zip(*known, strict=True), color=colour(0), linewidth=1.2)
    axes.set_title(name, fontsize=8)
    axes.set_xlabel("iteration", fontsize=8)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.tick_params(labelsize=8)
    grid(axes)
