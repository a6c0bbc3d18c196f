"""Residuals as a page that needs no network, and as one SVG: a point a reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.plan.readings.residual import Residual, Residuals
from tools.plan.readings.summary import MEMORY, TIME, by_source, error_cells, kind_of
from tools.records.io import write_whole
from tools.spec.files import ROOT
from tools.text.svg import svg_figure
from tools.text.units import GIB

FOLDER = ROOT / "docs"
_COLUMNS = (
    "line",
    "source",
    "where",
    "model",
    "GPU",
    "generation",
    "GPUs",
    "TP",
    "PP",
    "CP",
    "EP",
    "DP",
    "dtype",
    "kind",
    "published",
    "predicted",
    "error",
)
_FILTERS = ("kind", "source", "GPU", "TP", "PP", "dtype")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1")


def write_page(residuals: Residuals, folder: Path = FOLDER) -> tuple[Path, Path]:
    """Write `residuals.html` and `residuals.svg`."""
    page, picture = folder / "residuals.html", folder / "residuals.svg"
    folder.mkdir(exist_ok=True)
    write_whole(page, _html(residuals))
    _draw(residuals, picture)
    return page, picture


def _html(residuals: Residuals) -> str:
    from jinja2 import Environment, FileSystemLoader, select_autoescape
    from markupsafe import Markup

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=select_autoescape(default=True))
    data = {
        "columns": _COLUMNS,
        "filters": _FILTERS,
        "rows": [_row(item) for item in _plotted(residuals)],
    }
    header, *rows = error_cells(by_source(residuals))
    # "<" never stands in a script element's text but as the start of a tag.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = environment.get_template("residuals.html.j2")
    return template.render(
        predicted=len(residuals.predicted),
        total=len(residuals.predicted) + len(residuals.refused),
        header=header,
        rows=rows,
        data=Markup(packed),  # noqa: S704  made above, and escaped for a script element
    )


def _plotted(residuals: Residuals) -> list[Residual]:
    return [item for item in residuals.predicted if item.reading.metric != "matmul_tflops"]


def _row(item: Residual) -> list[Any]:
    reading, expressed = item.reading, item.expressed
    split, device = expressed.spec.parallelism, expressed.cluster.device
    published, predicted = _values(item)
    quantised = expressed.spec.quantised
    return [
        *(
            reading.line,
            reading.source,
            reading.where,
            reading.model,
            device.name,
            device.generation,
        ),
        *(expressed.cluster.devices, split.tensor, split.pipeline, split.context, split.expert),
        *(split.data, str(quantised or expressed.spec.dtype), kind_of(reading.metric)),
        *(float(f"{published:.5g}"), float(f"{predicted:.5g}"), round(item.error, 4)),
    ]


def _values(item: Residual) -> tuple[float, float]:
    """Published and predicted seconds an iteration, or bytes."""
    metric, value = item.reading.metric, item.reading.value
    if kind_of(metric) == MEMORY:
        unit = GIB if metric.endswith("_gib") else 1e9 if metric.endswith("_gb") else 1
        return value * unit, item.predicted * unit
    if metric == "step_time_s":
        return value, item.predicted
    seconds = item.seconds
    assert seconds is not None
    return seconds / (1 + item.error), seconds


def _draw(residuals: Residuals, path: Path) -> None:
    items = _plotted(residuals)
    generations = sorted({item.expressed.cluster.device.generation for item in items})
    with svg_figure(path, "residuals", 9, 4.4, dpi=160) as figure:
        for axes, kind in zip(figure.subplots(1, 2), (TIME, MEMORY), strict=True):
            for generation, colour in zip(generations, _COLOURS, strict=False):
                points = [
                    _values(item)
                    for item in items
                    if kind_of(item.reading.metric) == kind
                    and item.expressed.cluster.device.generation == generation
                ]
                if points:
                    axes.scatter(
                        *zip(*points, strict=True),
                        s=5,
                        alpha=0.5,
                        c=colour,
                        label=generation,
                        rasterized=True,
                    )
            axes.set_xscale("log")
            axes.set_yscale("log")
            ends = axes.get_xlim()
            axes.plot(ends, ends, linewidth=0.8, color="#555555")
            axes.set_title("seconds an iteration" if kind == TIME else "bytes")
            axes.set_xlabel("published")
            axes.set_ylabel("predicted")
        figure.axes[0].legend(frameon=False, markerscale=2)
