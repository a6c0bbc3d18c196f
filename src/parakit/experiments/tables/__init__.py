"""What is said of measured runs, one module for each kind of comparison, over the report's rows.

What their pages say around the tables, and their sentences, are in `examples/experiments/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from parakit.experiments.load import read_experiment_file


def format_page(kind: str, /, **parts: str) -> str:
    """The page of a kind of table, the `page:` of the experiment of its name, with its parts."""
    return _read_cached_file(kind).page.rstrip().format(**parts)


def format_sentence(kind: str, name: str, /, **parts: object) -> str:
    """One of the kind's `sentences:`, with its parts."""
    return _read_cached_file(kind).sentences[name].format(**parts)


_read_cached_file = cache(read_experiment_file)


def format_bullets(sentences: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {format_sentence}" for format_sentence in sentences)
