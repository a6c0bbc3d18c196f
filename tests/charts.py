"""Charts that unit tests draw without the layout and the SVG of matplotlib."""

from collections.abc import Callable

import pytest
from matplotlib.figure import Figure

from parakit.reporting import canvas

EMPTY_SVG = '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"></svg>\n'


def paint_without_layout(name: str, painter: Callable[[Figure], None]) -> str:
    """Run the painter of a chart on a real figure, and return an SVG file without content.

    The painter is the kit's own code. matplotlib's layout and SVG take two thirds of the time of a report, and few
    tests look at them.
    """
    figure = Figure(figsize=(canvas.WIDTH_INCHES, 3.2))
    painter(figure)
    assert figure.axes, f"the painter of the chart {name} has drawn nothing"
    return EMPTY_SVG


@pytest.fixture
def laid_out_charts() -> None:
    """Let the charts of a test be laid out and written by matplotlib, for tests that look at them."""


@pytest.fixture(autouse=True)
def charts_without_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw charts with `paint_without_layout`, unless the test asks for `laid_out_charts`.

    Fixtures of a module come first, so the charts that they draw are laid out.
    """
    if "laid_out_charts" not in request.fixturenames:
        monkeypatch.setattr(canvas, "_render", paint_without_layout)
