"""Write `logprob.html`: the verdict, and the difference per token along the sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parakit.artifacts.io import write_atomically
from parakit.experiments.logprob.sides import Sides
from parakit.formatting.html import environment
from parakit.formatting.svg import COLOURS, svg_figure
from parakit.logprob import LogprobVerdict, subtract

PAGE_FILE, DRAWING_FILE = "logprob.html", "differences.svg"
_TEMPLATES = Path(__file__).parent / "templates"


def write_page(folder: Path, verdict: LogprobVerdict, sides: Sides) -> None:
    """Write the page and its drawing into a folder that exists."""
    draw_differences(folder / DRAWING_FILE, sides)
    drawing = (folder / DRAWING_FILE).read_text()
    template = environment(_TEMPLATES).get_template("logprob.html.j2")
    write_atomically(
        folder / PAGE_FILE,
        template.render(verdict=verdict, drawing=drawing[drawing.index("<svg") :]),
    )


def draw_differences(path: Path, sides: Sides) -> None:
    """Draw training minus serving per token, one line per sequence."""
    training = sides.training.select(sides.prompt_tokens)
    serving = sides.read_serving()
    differences = np.where(serving.is_scored, subtract(training, serving), np.nan)
    with svg_figure(path, "logprob", 8, 3) as figure:
        axes = figure.add_subplot()
        for sequence, values in enumerate(differences):
            axes.plot(values, color=COLOURS[sequence % len(COLOURS)], label=f"sequence {sequence}")
        axes.set_xlabel("position in the sequence")
        axes.set_ylabel("training − serving (nats)")
        axes.axhline(0, color="#7f7f7f", linewidth=0.5)
        axes.legend(frameon=False, ncols=4)
