"""`make inspect CKPT= COMPARE=` of two captures: which tensor of a training step is the first wrong one.

Nothing is trained: any program writes them (`parakit.capturing.plain`). Of checkpoints it is
`parakit.checkpoint` that is asked.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from parakit.artifacts.verdict import Outcome, Verdict
from parakit.checkpoint import inspect_command
from parakit.config.files import ROOT
from parakit.formatting.terminal import say
from parakit.verify import (
    Judgement,
    VerifyError,
    judge,
    read_capture,
    reassemble_to_one_rank,
    refuse_comparison,
)


def inspect(
    ckpt: str, compare: str | None, strategy: str | None, verify: bool, json: bool = False
) -> int:
    """A checkpoint's contents, or what a capture differs in from COMPARE='s; 1 if something is wrong.

    Raises:
        ValueError: It is neither, or COMPARE= is missing; one sentence.
    """
    ours = ROOT / Path(ckpt).expanduser()
    if not (ours / "rank-0").is_dir():
        return inspect_command(ckpt, compare, strategy, verify, json)
    if compare is None:
        raise VerifyError(f"{ckpt} is a capture; name its reference, such as COMPARE=captures/one.")
    verdict = compared(ROOT / Path(compare).expanduser(), ours).verdict
    if json:
        print(msgspec.json.format(msgspec.json.encode(verdict)).decode())
        return verdict.exit_code
    console = Console()
    say_outcome(console, verdict)
    say(console, f"compared {verdict.compared:,} of {verdict.seen:,} tensors")
    for line in verdict.not_aligned[:5]:
        say(console, f"not compared: {line}")
    return verdict.exit_code


def say_outcome(console: Console, verdict: Verdict) -> None:
    """A line in its colour."""
    if verdict.verdict is Outcome.NOT_COMPARABLE:
        say(console, f"not comparable: {verdict.reason}", "red")
    elif verdict.verdict is Outcome.HELD:
        ratio = verdict.worst_ratio or 0.0
        say(console, f"held: no error is above {ratio:.2f} of its tolerance", "green")
    else:
        say(console, f"differs at: {verdict.line}", "red")


def compared(reference: Path, strategy: Path) -> Judgement:
    """The judgement on one capture by another, which has measured responses."""
    try:
        theirs, ours = read_capture(reference), read_capture(strategy)
        with tempfile.TemporaryDirectory() as scratch:
            return judge(reassemble_to_one_rank(theirs, ours, Path(scratch) / "whole"), ours)
    except VerifyError as error:
        return refuse_comparison(str(error))
