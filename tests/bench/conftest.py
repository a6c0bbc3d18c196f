"""Fixtures of this folder: the kit's code is read only once, because it does not change during tests."""

from tests.experiments.conftest import code_read_once

__all__ = ["code_read_once"]
