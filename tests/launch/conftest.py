"""Runs are named by the second."""

import pytest


@pytest.fixture(autouse=True)
def _quick_clock(quick_clock: None) -> None:
    """For all tests of this folder."""
