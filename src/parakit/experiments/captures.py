"""`make inspect CKPT= COMPARE=` of two captures: which tensor of a training step is the first wrong one.

Nothing is trained: any program writes them (`parakit.capturing.plain`). Of checkpoints it is
`parakit.checkpoint` that is asked.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from parakit.checkpoint import inspect_command
from parakit.verify import (
    Judgement,
    VerifyError,
    judge,
    read_capture,
    reassemble_to_one_rank,
    refuse_comparison,
)


def inspect_checkpoint_or_capture(
    ckpt: str, compare: str | None, strategy: str | None, verify: bool, json: bool = False
) -> int:
    """A checkpoint's contents, or what a capture differs in from COMPARE='s; 1 if something is wrong.

    Raises:
        ValueError: It is neither, or COMPARE= is missing; one sentence.
    """
    ours = Path(ckpt).expanduser()
    if not (ours / "rank-0").is_dir():
        return inspect_command(ckpt, compare, strategy, verify, json)
    if compare is None:
        raise VerifyError(f"{ckpt} is a capture; name its reference, such as COMPARE=captures/one.")
    verdict = judge_captures(Path(compare).expanduser(), ours).verdict
    if json:
        print(msgspec.json.format(msgspec.json.encode(verdict)).decode())
        return verdict.exit_code
    verdict.show(Console())
    return verdict.exit_code


def judge_captures(reference: Path, strategy: Path) -> Judgement:
    """Judge one capture by another, the reference, which has measured how far rounding moves tensors.

    Captures that cannot be compared give the verdict `not comparable`, with the reason.
    """
    try:
        theirs, ours = read_capture(reference), read_capture(strategy)
        with tempfile.TemporaryDirectory() as scratch:
            return judge(reassemble_to_one_rank(theirs, ours, Path(scratch) / "whole"), ours)
    except VerifyError as error:
        return refuse_comparison(str(error))
