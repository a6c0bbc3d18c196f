"""The code does not change under these tests: its 10 MB are read once."""

import functools

import pytest

from parakit.launch.code import hash_sources

hash_once = functools.cache(hash_sources)


@pytest.fixture(autouse=True)
def code_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parakit.launch.code.hash_sources", hash_once)


@pytest.fixture(autouse=True)
def _quick_clock(quick_clock: None) -> None:
    """For all tests of this folder."""
