"""What is said of measured runs, one module for each kind of comparison, over the report's rows.

What their pages say around the tables is in `examples/experiments/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tools.spec.files import read_yaml
from tools.study.definition import FOLDER
from tools.text.units import DASH


def page(kind: str, /, **parts: str) -> str:
    """The page of a kind of table, the `page:` of the experiment of its name, with its parts."""
    text: str = read_yaml(FOLDER / f"{kind}.yaml")["page"]
    return text.rstrip().format(**parts)


def known(shape: str) -> Callable[[float | None], str]:
    """How a column writes a number, such as `{:.4f}`; a dash for one that is not known."""
    return lambda value: DASH if value is None else shape.format(value)


def bullets(sentences: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {sentence}" for sentence in sentences)
