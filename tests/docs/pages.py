"""Texts of the planner that pages contain: a test compares them with the pages and renews them.

A text replaces the text with the same beginning: the header of a table, or a sentence's words before its colon.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import wrap

from parakit.config.files import ROOT
from tests.docs.claims import claims_table
from tests.docs.predictions import (
    predictions,
    report_tables,
    size_rows,
    size_sentence,
    size_table,
    tensor_parallel_sentence,
)
from tests.docs.residuals import h200_tables, paper_table

_WIDTH = 124


def render_guide_texts() -> Iterator[str]:
    """Yield the predictions of `docs/guide.md`, one sentence each."""
    yield from predictions()


def render_lab_guide_texts() -> Iterator[str]:
    """Yield the tables of predictions in the lab guide, and its sentence on the all-reduces of TP."""
    yield from h200_tables()
    yield tensor_parallel_sentence()


def render_claim_texts() -> Iterator[str]:
    """Yield the tables of `docs/claims.md` and the sentence on the crossover, without the slow rules."""
    yield claims_table()
    rows = size_rows()
    yield from (size_table(rows), size_sentence(rows), *report_tables())


def render_published_texts() -> Iterator[str]:
    """Yield the table of papers in the README of the published measurements."""
    yield paper_table()


GUIDE, CLAIMS, PLANNER = (ROOT / "docs" / name for name in ("guide.md", "claims.md", "planner.md"))
PAGES: dict[Path, Callable[[], Iterator[str]]] = {
    GUIDE: render_guide_texts,
    CLAIMS: render_claim_texts,
    ROOT / "examples" / "gpt3" / "README.md": render_lab_guide_texts,
    ROOT / "src" / "parakit" / "planner" / "readings" / "README.md": render_published_texts,
}
"""Pages with the texts that they copy."""


def renewed(path: Path, texts: Iterable[str]) -> str:
    """Return the page with current texts.

    Raises:
        LookupError: The page has no text with the same beginning, or two.
    """
    page = path.read_text(encoding="utf-8")
    for text in texts:
        page = placed(page, text)
    return page


def placed(page: str, text: str) -> str:
    """Return the page with this text in place of the text with the same beginning. Sentences are wrapped again.

    Raises:
        LookupError: No text has this beginning, or several have it.
    """
    beginning, is_table = text.split("\n", 1)[0], text.startswith("|")
    if is_table:
        pattern = rf"^{re.escape(beginning)}(?:\n\|.*)*"
    else:
        beginning = text.partition(":")[0]
        pattern = r"\s+".join(map(re.escape, beginning.split())) + r":.*?\.(?=\s)"
    matches = list(re.finditer(pattern, page, re.MULTILINE if is_table else re.DOTALL))
    if len(matches) != 1:
        raise LookupError(f"{len(matches)} texts begin with '{beginning}'; one is needed.")
    start, end = matches[0].span()
    lines = text if is_table else _wrapped(text, page[page.rfind("\n", 0, start) + 1 : start])
    return page[:start] + lines + page[end:]


def _wrapped(text: str, before: str) -> str:
    """Return a sentence wrapped behind the text that starts its line."""
    mark = re.match(r" *(?:[-*] |\d+\. )?", before)
    indent = " " * (mark.end() if mark else 0)
    lines = wrap(
        text,
        _WIDTH,
        initial_indent=" " * len(before),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)[len(before) :]
