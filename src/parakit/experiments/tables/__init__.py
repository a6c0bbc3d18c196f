"""What is said of measured runs, one module for each kind of comparison, over the report's rows.

What their pages say around the tables, and their sentences, are in `examples/experiments/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from parakit.experiments.load import experiment_file


def page(kind: str, /, **parts: str) -> str:
    """The page of a kind of table, the `page:` of the experiment of its name, with its parts."""
    return _file(kind).page.rstrip().format(**parts)


def sentence(kind: str, name: str, /, **parts: object) -> str:
    """One of the kind's `sentences:`, with its parts."""
    return _file(kind).sentences[name].format(**parts)


_file = cache(experiment_file)


def bullets(sentences: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {sentence}" for sentence in sentences)
