"""The spelling of a command's caller, in which texts name variables and commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_rewrite: ContextVar[Callable[[str], str]] = ContextVar("rewrite", default=str)


@contextmanager
def spelled_for_caller(rewrite: Callable[[str], str]) -> Iterator[None]:
    """Let `spell_for_caller` and every `CallerConsole` rewrite texts with a function in the `with` block."""
    token = _rewrite.set(rewrite)
    try:
        yield
    finally:
        _rewrite.reset(token)


def spell_for_caller(text: str) -> str:
    """Return a text that names variables and commands as the caller of the command writes them."""
    return _rewrite.get()(text)
