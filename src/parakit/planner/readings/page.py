"""Errors of all predictions as an HTML page that needs no network, and as an SVG picture with a point per measurement.

`docs/residuals.svg` is committed. The page is not: `make docs` writes it into the site.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from parakit.artifacts.io import write_atomically
from parakit.config.files import ROOT
from parakit.formatting.html import environment
from parakit.formatting.svg import COLOURS, svg_figure
from parakit.formatting.table import Column, Table
from parakit.formatting.units import GIB
from parakit.planner.readings.intervals import LEVELS, PredictionErrors
from parakit.planner.readings.residual import Residual, Residuals
from parakit.planner.readings.residual import compute_residuals as predict_residuals
from parakit.planner.readings.summary import (
    ERROR_COLUMNS,
    MEMORY,
    TIME,
    ErrorGroup,
    IntervalCoverage,
    drop_matrix_products,
    group_by_coverage,
    group_by_source,
    metric_kind,
)
from parakit.planner.readings.table import read_measurements

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = ROOT / "docs"


def write_page(
    residuals: Residuals, stated: PredictionErrors, folder: Path = FOLDER
) -> tuple[Path, Path]:
    """Write `residuals.html` and `residuals.svg` into a folder and return their paths.

    The folder is made if it does not exist.

    Args:
        residuals: The measurements with their predictions.
        stated: Errors from which the intervals of the predictions are computed.
    """
    folder.mkdir(exist_ok=True)
    page, picture = _write_html(residuals, folder), folder / "residuals.svg"
    _draw_residuals(drop_matrix_products(residuals), group_by_coverage(residuals, stated), picture)
    return page, picture


def write_residuals_page(folder: Path) -> Path:
    """Predict every published measurement and write `residuals.html` into a folder; return its path."""
    return _write_html(predict_residuals(*read_measurements()), folder)


def _write_html(residuals: Residuals, folder: Path) -> Path:
    """Write `residuals.html`, a page with all measurements and predictions, into a folder.

    Return the path of the page.
    """
    from markupsafe import Markup

    page = folder / "residuals.html"
    plotted = drop_matrix_products(residuals)
    data = {
        "columns": [column.name for column in _COLUMNS],
        "filters": ("kind", "source", "GPU", "TP", "PP", "dtype"),
        "rows": [[column.value(item) for column in _COLUMNS] for item in plotted],
    }
    errors = Table((*_GROUP, *ERROR_COLUMNS), tuple(group_by_source(residuals)))
    # A browser reads "<" in a script element's text as the start of a tag.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = environment(Path(__file__).parent).get_template("residuals.html.j2")
    text = template.render(
        predicted=len(residuals.predicted),
        total=len(residuals.predicted) + len(residuals.refused),
        header=errors.header,
        rows=errors.cells,
        data=Markup(packed),  # noqa: S704  made above, and escaped for a script element
    )
    write_atomically(page, text)
    return page


_GROUP = (
    Column[ErrorGroup]("source", lambda group: group.name),
    Column[ErrorGroup]("readings", lambda group: group.readings),
    Column[ErrorGroup]("predicted", lambda group: len(group.errors)),
)


def _degree_column(name: str, degree: str) -> Column[Residual]:
    """Return a column with one parallel size of a run."""
    return Column(name, lambda item: getattr(item.measured_run.spec.parallelism, degree))


_COLUMNS = (
    Column[Residual]("line", lambda item: item.measurement.line),
    Column[Residual]("source", lambda item: item.measurement.source),
    Column[Residual]("where", lambda item: item.measurement.where),
    Column[Residual]("model", lambda item: item.measurement.model),
    Column[Residual]("GPU", lambda item: item.measured_run.cluster.device.name),
    Column[Residual]("generation", lambda item: item.measured_run.cluster.device.generation),
    Column[Residual]("GPUs", lambda item: item.measured_run.cluster.devices),
    _degree_column("TP", "tensor"),
    _degree_column("PP", "pipeline"),
    _degree_column("CP", "context"),
    _degree_column("EP", "expert"),
    _degree_column("DP", "data"),
    Column[Residual](
        "dtype", lambda i: str(i.measured_run.spec.fp8_recipe or i.measured_run.spec.dtype)
    ),
    Column[Residual]("kind", lambda item: metric_kind(item.measurement.metric)),
    Column[Residual]("published", lambda item: float(f"{_values(item)[0]:.5g}")),
    Column[Residual]("predicted", lambda item: float(f"{_values(item)[1]:.5g}")),
    Column[Residual]("error", lambda item: round(item.error, 4)),
)


def _values(item: Residual) -> tuple[float, float]:
    """Return the published and the predicted value of a measurement: seconds per iteration, or bytes of memory."""
    metric = item.measurement.metric
    if item.seconds is not None:
        return item.published_seconds, item.seconds
    unit = GIB if metric.endswith("_gib") else 1e9 if metric.endswith("_gb") else 1
    return item.measurement.value * unit, item.predicted * unit


def _draw_residuals(items: list[Residual], kinds: list[IntervalCoverage], path: Path) -> None:
    """Draw predicted against published times and memory, and the fraction of measurements inside intervals.

    The picture is written to `path` as SVG.
    """
    generations = sorted({item.measured_run.cluster.device.generation for item in items})
    with svg_figure(path, "residuals", 13, 4.4, dpi=160) as figure:
        *panels, reliability = figure.subplots(1, 3)
        for axes, kind in zip(panels, (TIME, MEMORY), strict=True):
            for generation, colour in zip(generations, COLOURS, strict=False):
                points = [
                    _values(item)
                    for item in items
                    if metric_kind(item.measurement.metric) == kind
                    and item.measured_run.cluster.device.generation == generation
                ]
                if points:
                    style = {"c": colour, "label": generation, "rasterized": True}
                    axes.scatter(*zip(*points, strict=True), s=5, alpha=0.5, **style)
            axes.set(xscale="log", yscale="log", xlabel="published", ylabel="predicted")
            ends = axes.get_xlim()
            axes.plot(ends, ends, linewidth=0.8, color="#555555")
            axes.set_title("seconds per iteration" if kind == TIME else "bytes")
        figure.axes[0].legend(frameon=False, markerscale=2)
        _draw_reliability(reliability, kinds)


def _draw_reliability(axes: Axes, kinds: list[IntervalCoverage]) -> None:
    """Draw the fraction of measurements that lie inside their intervals, against the intervals' level.

    All times and all memory have a coloured line each, and each kind of run has a grey line.
    """
    colours = iter(COLOURS)
    for kind in kinds:
        levels, fractions = zip(*kind.shares.items(), strict=True)
        if kind.name.startswith("all "):
            axes.plot(levels, fractions, color=next(colours), marker="o", label=kind.name)
        else:
            axes.plot(levels, fractions, color="#AAAAAA", linewidth=0.8)
    axes.plot((LEVELS[0], 1), (LEVELS[0], 1), linewidth=0.8, color="#555555", linestyle="--")
    axes.set(xlabel="stated level", ylabel="fraction of measurements inside", ylim=(0.4, 1.02))
    axes.set_title("intervals")
    axes.legend(frameon=False, loc="lower right")
