"""Fixtures of this folder. The 10 MB of code are read only once, because they do not change during tests."""

import functools

import pytest

from parakit.launch.code import hash_sources
from tests.charts import charts_without_layout, laid_out_charts

__all__ = ["charts_without_layout", "laid_out_charts"]

hash_once = functools.cache(hash_sources)


@pytest.fixture(autouse=True)
def code_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parakit.launch.code.hash_sources", hash_once)


@pytest.fixture(autouse=True)
def _quick_clock(quick_clock: None) -> None:
    """Use the fast clock in all tests of this folder."""
