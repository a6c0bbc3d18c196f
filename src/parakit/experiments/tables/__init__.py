"""Tables and sentences on measured runs, one module per kind of comparison.

Each module makes them from the rows of the report. The text around the tables, and the templates of the sentences,
are in `examples/experiments/<kind>.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from parakit.experiments.load import read_experiment_file


def format_page(kind: str, /, **parts: str) -> str:
    """Return the page of a kind of comparison: `page:` of its file, with `parts` filled in."""
    return _read_cached_file(kind).page.rstrip().format(**parts)


def format_sentence(kind: str, name: str, /, **parts: object) -> str:
    """Return a sentence of a kind of comparison: `sentences:` of its file, with `parts` filled in."""
    return _read_cached_file(kind).sentences[name].format(**parts)


_read_cached_file = cache(read_experiment_file)


def format_bullets(sentences: Iterable[str]) -> str:
    """Return the sentences as a Markdown list."""
    return "\n".join(f"- {format_sentence}" for format_sentence in sentences)
