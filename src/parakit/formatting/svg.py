"""Draw figures with matplotlib and write them as SVG files; matplotlib is imported at the first figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#8c6bb1", "#7f7f7f"),
)
"""Colours of series: six of Okabe and Ito's palette, then two further colours.

Colour-blind readers can tell the six apart, on white and on black.
"""


@contextmanager
def svg_figure(
    path: Path, name: str, width: float, height: float, **saved: Any
) -> Iterator[Figure]:
    """Yield an empty figure, and write it as SVG when the block ends. Equal figures give files with equal bytes.

    Args:
        path: File to write.
        name: Seed of the ids in the file, which must be unique on a page.
        width: Width in inches.
        height: Height in inches.
        saved: Further arguments of matplotlib's `savefig`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None}, **saved)
