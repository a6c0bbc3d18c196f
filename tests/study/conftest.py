"""The stand-ins of launch; and code that does not change under these tests: its 10 MB are read once."""

import functools

import pytest

from tests.launch.conftest import (  # noqa: F401
    _early_megatron_parser,
    megatron_parser,
    quick_clock,
    two_h200,
)
from tools.launch.code import tree_hash

hash_once = functools.cache(tree_hash)


@pytest.fixture(autouse=True)
def code_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.launch.code.tree_hash", hash_once)
