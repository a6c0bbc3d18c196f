"""`make why-hang DUMPS=…`: print the verdict on a job that hangs, and write it as a page on request."""

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
    """Print the verdict on a job. If `page` is a name, also write the verdict as an HTML page to this file.

    Sentences on files that could not be read go to stderr.

    Args:
        dumps: Files and folders with the evidence.
        json: Print one JSON object instead of text.
        page: Name of the page's file.

    Returns:
        The exit code: 0 if the verdict names a culprit, else 1.

    Raises:
        UnreadableDumpError: The files hold no evidence of any rank, or the page's folder does not exist.
    """
    path = Path(page).expanduser() if page else None
    if path and not path.parent.is_dir():
        raise UnreadableDumpError(
            f"--page {page} is in a folder that does not exist; make the folder, or name another."
        )
    diagnosis = diagnose_hang([Path(text).expanduser() for text in dumps])
    print(texts.dumps(diagnosis.to_dict()) if json else diagnosis.text)
    if path:
        write_atomically(path, render_page(diagnosis.evidence, diagnosis.verdict))
    for sentence in diagnosis.refused:
        print(sentence, file=sys.stderr)
    return 0 if diagnosis.verdict.culprits else 1
