"""What is said of measured runs, one module for each kind of comparison, over the report's rows.

What their pages say around the tables, and their sentences, are in `examples/experiments/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from tools.spec.files import read_yaml
from tools.study.definition import FOLDER
from tools.text.units import DASH


def page(kind: str, /, **parts: str) -> str:
    """The page of a kind of table, the `page:` of the experiment of its name, with its parts."""
    text: str = _file(kind)["page"]
    return text.rstrip().format(**parts)


def sentence(kind: str, name: str, /, **parts: object) -> str:
    """One of the kind's `sentences:`, with its parts."""
    text: str = _file(kind)["sentences"][name]
    return text.format(**parts)


@cache
def _file(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(FOLDER / f"{kind}.yaml")
    return found


def known(shape: str) -> Callable[[float | None], str]:
    """How a column writes a number, such as `{:.4f}`; a dash for one that is not known."""
    return lambda value: DASH if value is None else shape.format(value)


def bullets(sentences: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {sentence}" for sentence in sentences)
