"""Compare two captures: find the first wrong tensor of a training step (`make inspect CKPT= COMPARE=`).

Any trainer can write captures (`parakit.capturing.plain`); nothing is trained here. Checkpoints are passed on to
`parakit.checkpoint`.
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
    """Print the contents of a checkpoint, or the differences of a capture from its reference; 1 if wrong.

    Args:
        ckpt: Folder of a checkpoint or a capture.
        compare: Folder that it is compared with; a capture needs one.
        strategy: Strategy that a checkpoint is inspected for, or None.
        verify: Whether a checkpoint's files are verified.
        json: Whether the result is printed as JSON.

    Returns:
        Exit code: 0 if nothing is wrong.

    Raises:
        ValueError: The folder is neither, or COMPARE= is missing.
    """
    capture = Path(ckpt).expanduser()
    if not (capture / "rank-0").is_dir():
        return inspect_command(ckpt, compare, strategy, verify, json)
    if compare is None:
        raise VerifyError(f"{ckpt} is a capture; name its reference, such as COMPARE=captures/one.")
    verdict = judge_captures(Path(compare).expanduser(), capture).verdict
    if json:
        print(msgspec.json.format(msgspec.json.encode(verdict)).decode())
        return verdict.exit_code
    verdict.show(Console())
    return verdict.exit_code


def judge_captures(reference: Path, strategy: Path) -> Judgement:
    """Compare a strategy's capture with a reference's, and return the judgement.

    The reference's capture holds rounding probes, which give the tolerances. Captures that cannot be compared give
    the verdict `not comparable`, with the reason.

    Args:
        reference: Folder of the reference's capture.
        strategy: Folder of the strategy's capture.
    """
    try:
        reference_capture, capture = read_capture(reference), read_capture(strategy)
        with tempfile.TemporaryDirectory() as scratch:
            full = reassemble_to_one_rank(reference_capture, capture, Path(scratch) / "whole")
            return judge(full, capture)
    except VerifyError as error:
        return refuse_comparison(str(error))
