"""The page of a verification."""

from __future__ import annotations

from pathlib import Path

from tools.verify.verdict import Judgement


def write_page(folder: Path, judgement: Judgement) -> None:
    """Write `verify.html`."""
    (folder / "verify.html").write_text(str(judgement.verdict))
