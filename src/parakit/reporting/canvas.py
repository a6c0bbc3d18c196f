"""Draw charts as SVG: their style, which points they have, and how a figure becomes a file and a page's picture.

matplotlib is imported only here, and only when a chart is drawn. Charts of long runs have fewer points: curves
keep their extremes, and samples keep their distribution.
"""

from __future__ import annotations

import html
import importlib.util
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from parakit.formatting.svg import COLOURS
from parakit.reporting.analyse.entry import Entry, entry_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, INK_ALONE, PAPER = "#010203", "#24292f", "#fdfefd"
"""Placeholder for the text's colour, that colour in a file, and the placeholder for the background.

On the page, INK becomes `currentColor`, so that a chart follows the page's colours.
"""
WIDTH_INCHES = 7.6
_MAX_NAME_LENGTH = 34
_GOLDEN_RATIO = 0.6180339887498949
"""Steps of this size, modulo 1, fill an interval evenly and without a period."""


@dataclass(frozen=True)
class Chart:
    """Picture with its title and description."""

    name: str
    title: str
    text: str
    """Description, which is the picture's text alternative too."""
    svg: str
    """Contents of an SVG file, dark on white."""
    inline: str
    """SVG element for the page, in the text's colour on a transparent background."""


def can_draw() -> bool:
    """Return True if matplotlib is installed, which the wheel does not require."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_chart(name: str, title: str, text: str, painter: Callable[[Figure], None]) -> Chart:
    """Return the chart that `painter` draws, as an SVG file and as an SVG element for a page.

    Equal input gives equal bytes.

    Args:
        name: Name of the chart, which its file and its ids use.
        title: Title.
        text: Description.
        painter: Function that draws into an empty figure.
    """
    svg = _number_clip_paths(_render(name, painter))
    label = html.escape(f"{title}. {text}", quote=True)
    return Chart(
        name, title, text, svg=_colour_for_file(svg), inline=_adapt_to_page(svg, name, label)
    )


def _render(name: str, painter: Callable[[Figure], None]) -> str:
    """Return the SVG that matplotlib makes of a figure. Text and background have the placeholder colours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink_settings = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name, **dict.fromkeys(ink_settings, INK)}
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH_INCHES, 3.2), layout="constrained")
        painter(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _number_clip_paths(svg: str) -> str:
    """Return the SVG with a number as the id of each clip path.

    matplotlib makes the id from all digits of the bounds of the axes. The last digit differs between processes, because
    the layout's solver depends on addresses in memory.
    """
    for index, clip in enumerate(re.findall(r'<clipPath id="(\w+)"', svg)):
        svg = svg.replace(clip, f"clip{index}")
    return svg


def _colour_for_file(svg: str) -> str:
    """Return the SVG with dark text on white."""
    return svg.replace(INK, INK_ALONE).replace(PAPER, "#ffffff")


def _adapt_to_page(svg: str, name: str, label: str) -> str:
    """Return the SVG's element for a page, without the header of a file.

    It has the colour of the page's text, no background, and the text alternative `label`, in which HTML's special
    characters are escaped already.
    """
    element = svg[svg.index("<svg") :]
    element = element.replace(INK, "currentColor").replace(f"fill: {PAPER}", "fill: none")
    # Ids, and references to them, get the chart's name as a prefix, because they must differ between charts of a page.
    element = element.replace('id="', f'id="{name}-')
    element = element.replace('"#', f'"#{name}-').replace("url(#", f"url(#{name}-")
    return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.unicode_minus": True,
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
}


def entry_colour(index: int) -> str:
    """Return the colour of the row with an index in the report; colours repeat after eight rows."""
    return COLOURS[index % len(COLOURS)]


def add_grid(axes: Axes, axis: Any = "both") -> None:
    """Draw a faint grid behind the data, for the axis `x`, `y` or `both`."""
    axes.set_axisbelow(True)
    axes.grid(axis=axis, color=INK, alpha=0.15, linewidth=0.6)


def chart_labels(entries: Sequence[Entry]) -> list[str]:
    """Return the labels of rows for a chart."""
    return [chart_label(name) for name in entry_names(entries)]


def chart_label(name: str) -> str:
    """Return a name for use in a chart: cut to 34 characters, with dollar signs escaped.

    matplotlib would render text after a dollar sign as mathematics.
    """
    is_short = len(name) <= _MAX_NAME_LENGTH
    label = name if is_short else f"{name[: _MAX_NAME_LENGTH - 1]}…"
    return label.replace("$", r"\$")


def extreme_indexes(values: Sequence[float] | NDArray[np.float64], limit: int) -> list[int]:
    """Return the indexes of at most `limit` values to draw: the first, the last, and the extremes of each stretch.

    Every index is returned if there are no more than `limit` values. A limit below 4 counts as 4. Drawing every
    n-th value instead would lose spikes, and could show a run that alternates between two values as constant.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    length = math.ceil(count / max(1, (limit - 2) // 2))
    # The last stretch may be shorter than the others, so it is filled with values that are ignored below.
    padded = np.full(math.ceil(count / length) * length, np.nan)
    padded[:count] = values
    stretches = padded.reshape(-1, length)
    known = np.isfinite(stretches).any(axis=1)
    starts, stretches = np.flatnonzero(known) * length, stretches[known]
    lowest = starts + np.nanargmin(stretches, axis=1)
    highest = starts + np.nanargmax(stretches, axis=1)
    return sorted({0, count - 1, *lowest.tolist(), *highest.tolist()})


def evenly_spread_indexes(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` indexes, spread evenly and without a period."""
    if count <= limit:
        return list(range(count))
    return sorted({math.floor((k * _GOLDEN_RATIO) % 1 * count) for k in range(1, limit + 1)})
