"""How charts look, which points they have, and how they become SVG.

matplotlib is imported only here, only when drawing. Fewer points of a long run show the same: curves
keep their extremes, samples their mixture.
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

# Stands for "the text's colour": the page makes it currentColor, a file on its own dark grey.
INK, INK_ALONE, PAPER = "#010203", "#24292f", "#fdfefd"
WIDTH_INCHES = 7.6
_MAX_NAME = 34
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Chart:
    """One picture."""

    name: str
    title: str
    text: str
    """Describes the picture; also its text alternative."""
    svg: str
    """Complete file, dark on white."""
    inline: str
    """For the page: the text's own colour on a transparent ground."""


def can_draw() -> bool:
    """Whether matplotlib is installed; the wheel's base leaves it out."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_chart(name: str, title: str, text: str, painter: Callable[[Figure], None]) -> Chart:
    """Let a painter fill a figure, and make SVG of it; equal input gives equal bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name, **dict.fromkeys(inked, INK)}
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH_INCHES, 3.2), layout="constrained")
        painter(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    # A clip path's id is a hash of all digits of its axes' bounds. The layout's solver goes by addresses
    # in memory, so that the last digit differs between processes.
    for place, clip in enumerate(re.findall(r'<clipPath id="(\w+)"', svg)):
        svg = svg.replace(clip, f"clip{place}")
    alone = svg.replace(INK, INK_ALONE).replace(PAPER, "#ffffff")
    inline = svg[svg.index("<svg") :]
    # Ids must differ between charts of one page, and a fixed size would not follow the window.
    inline = inline.replace(INK, "currentColor").replace(f"fill: {PAPER}", "fill: none")
    inline = inline.replace('id="', f'id="{name}-').replace('"#', f'"#{name}-')
    inline = inline.replace("url(#", f"url(#{name}-")
    spoken = html.escape(f"{title}. {text}", quote=True)
    inline = inline.replace("<svg", f'<svg role="img" aria-label="{spoken}"', 1)
    return Chart(name, title, text, alone, inline)


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


def entry_colour(place: int) -> str:
    """Colour of the entry at a place; they repeat after eight."""
    return COLOURS[place % len(COLOURS)]


def add_grid(axes: Axes, axis: Any = "both") -> None:
    """A faint grid behind the data."""
    axes.set_axisbelow(True)
    axes.grid(axis=axis, color=INK, alpha=0.15, linewidth=0.6)


def chart_labels(entries: Sequence[Entry]) -> list[str]:
    """Labels of entries, none too long; a dollar would start mathematics."""
    texts = entry_names(entries)
    cut = [t if len(t) <= _MAX_NAME else f"{t[: _MAX_NAME - 1]}…" for t in texts]
    return [text.replace("$", r"\$") for text in cut]


def extreme_indexes(values: Sequence[float] | NDArray[np.float64], limit: int) -> list[int]:
    """Places of at most `limit` values, both ends and the least and the largest of each stretch.

    A stride would show every second state of a run that alternates, and lose a spike.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    length = math.ceil(count / max(1, (limit - 2) // 2))
    found = np.full(math.ceil(count / length) * length, np.nan)
    found[:count] = values
    stretches = found.reshape(-1, length)
    known = np.isfinite(stretches).any(axis=1)
    starts, stretches = np.flatnonzero(known) * length, stretches[known]
    ends = (starts + np.nanargmin(stretches, axis=1), starts + np.nanargmax(stretches, axis=1))
    return sorted({0, count - 1, *(int(place) for place in np.concatenate(ends))})


def evenly_spread_indexes(count: int, limit: int) -> list[int]:
    """Places of at most `limit` of `count` samples, spread evenly and without a period of their own."""
    if count <= limit:
        return list(range(count))
    return sorted({math.floor((k * _GOLDEN) % 1 * count) for k in range(1, limit + 1)})
