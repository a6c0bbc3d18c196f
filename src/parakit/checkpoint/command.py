"""The handlers of `make inspect` and `make reshard`. They refuse a folder before torch is imported."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parakit.checkpoint.contents import read_contents
from parakit.checkpoint.inspection import inspect_folder
from parakit.config.files import ROOT

if TYPE_CHECKING:
    from rich.console import Console


def inspect_command(
    ckpt: str, compare: str | None, strategy: str | None, verify: bool, json: bool = False
) -> int:
    """Print the inspection of a checkpoint; print its problems to stderr.

    Args:
        ckpt: The checkpoint's folder, or a folder that holds checkpoints or a run.
        compare: Another checkpoint to compare with; None or empty compares nothing.
        strategy: A strategy to judge: can it load the checkpoint? None or empty judges nothing.
        verify: True to read every piece and compare it with its checksum.
        json: True to print JSON instead of text.

    Returns:
        0 if the checkpoint has no fault, the strategy can load it, and both checkpoints hold the same model;
        else 1.

    Raises:
        ValueError: A folder holds no checkpoint, or a checkpoint of a format that the kit does not read.
    """
    other = Path(compare).expanduser() if compare else None
    inspection = inspect_folder(
        Path(ckpt).expanduser(), compare=other, strategy=strategy, verify=verify
    )
    print(json_format.dumps(inspection.to_dict(), indent=2) if json else inspection.text)
    problems = (*inspection.problems, *inspection.other_problems)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems and not json:
        print(inspection.coverage.sentences)
    if compare and problems:
        print("Nothing was compared: both checkpoints must be complete.", file=sys.stderr)
    return 0 if inspection.is_as_wanted else 1


def reshard_command(ckpt: str, strategy: str, to: str, console: Console) -> int:
    """Write a checkpoint as another strategy would have saved it, and return 0.

    Args:
        ckpt: CKPT=, the folder of the checkpoint.
        strategy: STRATEGY=, the name of the other strategy.
        to: TO=, the folder to write, which must not exist.
        console: Receives progress, the path of the result, and hints for the user who loads the result.

    Raises:
        ValueError: The checkpoint cannot be resharded. The message is one sentence with the reason.
    """
    contents = read_contents(ROOT / Path(ckpt).expanduser())
    # Importing torch takes much longer than reading the folder, so a wrong folder is refused before.
    from parakit.checkpoint.reshard import reshard

    return reshard(contents, strategy, to, console)
