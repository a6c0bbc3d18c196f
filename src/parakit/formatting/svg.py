"""Pictures as SVG files. matplotlib is imported only when one is drawn."""

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
"""Okabe and Ito's, distinct for colour-blind readers, on white as on black; then two more."""


@contextmanager
def svg_figure(
    path: Path, name: str, width: float, height: float, **saved: Any
) -> Iterator[Figure]:
    """A figure of so many inches, written when the block ends; equal input gives equal bytes.

    Ids in the file follow from `name`; `saved` are further arguments of `savefig`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None}, **saved)
