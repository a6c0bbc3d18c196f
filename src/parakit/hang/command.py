"""`make why-hang DUMPS=…`: the sentence, the chain, what to look at next, and a page for offline."""

from __future__ import annotations

import json as texts
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parakit.artifacts.io import write_whole
from parakit.config.files import ROOT
from parakit.hang.dumps import UnreadableError
from parakit.hang.gather import gather_evidence
from parakit.hang.page import render_page
from parakit.hang.verdict import Verdict, judge


def why_hang(dumps: Sequence[str], json: bool = False, page: str | None = None) -> int:
    """Print the verdict, and write the page if one is named; return 0 if a rank is named, else 1.

    Raises:
        UnreadableError: Nothing there says anything of a rank, or the page has no folder; one sentence.
    """
    if page and not (ROOT / Path(page).expanduser()).parent.is_dir():
        raise UnreadableError(
            f"--page {page} is in no folder that exists; make it, or name another."
        )
    evidence = gather_evidence([ROOT / Path(text).expanduser() for text in dumps])
    found = judge(evidence)
    if json:
        print(texts.dumps(as_json(found)))
    else:
        kind = [f"Kind: {found.kind}. {found.next_step}"] if found.kind else []
        chain = [f"  {one}" for one in found.chain]
        watchdog = [f"Watchdog: {one}" for one in evidence.timed_out[:1]]
        print("\n".join([found.sentence, *kind, *chain, *watchdog]))
    if page:
        write_whole(ROOT / Path(page).expanduser(), render_page(evidence, found))
    for sentence in evidence.refused:
        print(sentence, file=sys.stderr)
    return 0 if found.culprits else 1


def as_json(verdict: Verdict) -> dict[str, Any]:
    """The object that `JSON=1` prints."""
    return {name: value for name, value in asdict(verdict).items() if name != "chain"}
