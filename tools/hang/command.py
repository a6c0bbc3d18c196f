"""`make why-hang DUMPS=…`: the sentence, the chain, what to look at next."""

from __future__ import annotations

import json as texts
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.hang.gather import gather
from tools.hang.page import page_of
from tools.hang.verdict import Outcome, Verdict, judge
from tools.records.io import write_whole
from tools.spec.files import ROOT


def why_hang(dumps: Sequence[str], json: bool = False, page: str | None = None) -> int:
    """Print the verdict, and write the page if one is named; 1 where the evidence does not decide.

    Raises:
        UnreadableError: Nothing there says anything of a rank; one sentence.
    """
    evidence = gather([ROOT / Path(text).expanduser() for text in dumps])
    found = judge(evidence)
    print(_json(found) if json else _text(found, evidence.timed_out))
    if page:
        write_whole(ROOT / Path(page).expanduser(), page_of(evidence, found))
    for sentence in evidence.refused:
        print(sentence, file=sys.stderr)
    return int(found.verdict is Outcome.UNDECIDED)


def _json(found: Verdict) -> str:
    said = asdict(found)
    said.pop("chain")
    return texts.dumps(said)


def _text(found: Verdict, timed_out: Sequence[str]) -> str:
    lines = [found.sentence]
    if found.kind:
        lines.append(f"Kind: {found.kind}. {found.next_step}")
    lines += [f"  {one}" for one in found.chain]
    lines += [f"Watchdog: {one}" for one in timed_out[:1]]
    return "\n".join(lines)
