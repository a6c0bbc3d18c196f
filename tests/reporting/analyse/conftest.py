"""Fixtures of this folder: reports without charts, because the tests look at rows, sentences and verdicts."""

import pytest

from parakit.reporting import canvas
from tests.charts import EMPTY_SVG


@pytest.fixture(autouse=True)
def charts_without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all charts of a report empty.

    Painters run in the tests of `render` and `explain`, and with the logs of other programs. Here they would take a
    third of the time.
    """
    monkeypatch.setattr(canvas, "_render", lambda name, painter: EMPTY_SVG)
