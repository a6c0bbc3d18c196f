"""How charts look, and how they become SVG. matplotlib is imported only here, only when drawing."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools.report.analyse.entry import Entry, names_of
from tools.text.svg import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stands for "the text's colour": the page makes it currentColor, a file on its own dark grey.
INK, INK_ALONE, PAPER = "#010203", "#24292f", "#fdfefd"
WIDTH_INCHES = 7.6
_MAX_NAME = 34


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


def draw(name: str, title: str, text: str, painter: Callable[[Figure], None]) -> Chart:
    """Let a painter fill a figure, and make SVG of it; equal input gives equal bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_style(name)):
        figure = Figure(figsize=(WIDTH_INCHES, 3.2), layout="constrained")
        painter(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    alone = svg.replace(INK, INK_ALONE).replace(PAPER, "#ffffff")
    inline = svg[svg.index("<svg") :]
    # Ids must differ between charts of one page, and a fixed size would not follow the window.
    inline = inline.replace(INK, "currentColor").replace(f"fill: {PAPER}", "fill: none")
    inline = inline.replace('id="', f'id="{name}-').replace('"#', f'"#{name}-')
    inline = inline.replace("url(#", f"url(#{name}-")
    spoken = html.escape(f"{title}. {text}", quote=True)
    inline = inline.replace("<svg", f'<svg role="img" aria-label="{spoken}"', 1)
    return Chart(name, title, text, alone, inline)


def colour(place: int) -> str:
    """Colour of the entry at a place; they repeat after eight."""
    return COLOURS[place % len(COLOURS)]


def grid(axes: Axes, axis: Any = "both") -> None:
    """A faint grid behind the data."""
    axes.set_axisbelow(True)
    axes.grid(axis=axis, color=INK, alpha=0.15, linewidth=0.6)


def names(entries: Sequence[Entry]) -> list[str]:
    """Labels of entries, none too long."""
    cut = [
        text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"
        for text in names_of(entries)
    ]
    return [text.replace("$", r"\$") for text in cut]  # A dollar would start mathematics.


def _style(salt: str) -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.unicode_minus": True,
        "legend.frameon": False,
        "figure.facecolor": PAPER,
        "axes.facecolor": "none",
    }
