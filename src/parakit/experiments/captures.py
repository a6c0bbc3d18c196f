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
    """Print the contents of a checkpoint, or compare a capture with a reference capture and print the verdict.

    A folder with a folder `rank-0` is a capture, and any other folder is taken for a checkpoint.

    Args:
        ckpt: Folder of a checkpoint or a capture.
        compare: Folder of another checkpoint or capture to compare with; None is possible for a checkpoint only.
        strategy: Strategy for which a checkpoint is inspected; None if no other strategy is asked about.
        verify: True to verify a checkpoint's files.
        json: True to print the result as JSON.

    Returns:
        Exit code: 0 if nothing is wrong. For a capture, it is the verdict's exit code.

    Raises:
        ValueError: The folder is neither a checkpoint nor a capture, or COMPARE= is missing for a capture.
    """
    folder = Path(ckpt).expanduser()
    if not (folder / "rank-0").is_dir():
        return inspect_command(ckpt, compare, strategy, verify, json)
    if compare is None:
        raise VerifyError(f"{ckpt} is a capture; name its reference, such as COMPARE=captures/one.")
    verdict = judge_captures(Path(compare).expanduser(), folder).verdict
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
