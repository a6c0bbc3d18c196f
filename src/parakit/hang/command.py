"""`make why-hang DUMPS=…`: the sentence, the chain, what to look at next, and a page for offline."""

from __future__ import annotations

import json as texts
import sys
from collections.abc import Sequence
from pathlib import Path

from parakit.artifacts.io import write_atomically
from parakit.hang.diagnosis import diagnose_hang
from parakit.hang.dumps import UnreadableDumpError
from parakit.hang.page import render_page


def why_hang(dumps: Sequence[str], json: bool = False, page: str | None = None) -> int:
    """Print the verdict, and write the page if one is named; return 0 if a rank is named, else 1.

    Raises:
        UnreadableError: Nothing there says anything of a rank, or the page has no folder; one sentence.
    """
    path = Path(page).expanduser() if page else None
    if path and not path.parent.is_dir():
        raise UnreadableDumpError(
            f"--page {page} is in no folder that exists; make it, or name another."
        )
    diagnosis = diagnose_hang([Path(text).expanduser() for text in dumps])
    print(texts.dumps(diagnosis.to_dict()) if json else diagnosis.text)
    if path:
        write_atomically(path, render_page(diagnosis.evidence, diagnosis.verdict))
    for sentence in diagnosis.refused:
        print(sentence, file=sys.stderr)
    return 0 if diagnosis.verdict.culprits else 1
