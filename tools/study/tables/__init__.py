"""What is said of measured runs, one module for each kind of comparison, over the report's rows.

What their pages say around the tables is in `examples/experiments/`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tools.spec.files import read_yaml
from tools.study.definition import FOLDER


def page(kind: str, /, **parts: str) -> str:
    """The page of a kind of table, the `page:` of the experiment of its name, with its parts."""
    text: str = read_yaml(FOLDER / f"{kind}.yaml")["page"]
    return text.rstrip().format(**parts)


def bullets(sentences: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {sentence}" for sentence in sentences)
