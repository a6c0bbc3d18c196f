"""`make inspect`: what is in a checkpoint, whether a strategy loads it, whether two are one model."""

from __future__ import annotations

import json as texts
import sys
from pathlib import Path

from parakit.checkpoint.inspection import inspect_folder


def inspect_command(
    ckpt: str, compare: str | None, strategy: str | None, verify: bool, json: bool = False
) -> int:
    """Print a checkpoint; 1 if something is wrong, the strategy cannot load it, or the two differ.

    Raises:
        ValueError: It is no checkpoint, or of a format that is not read; one sentence.
    """
    other = Path(compare).expanduser() if compare else None
    inspection = inspect_folder(
        Path(ckpt).expanduser(), compare=other, strategy=strategy, verify=verify
    )
    print(texts.dumps(inspection.to_dict(), indent=2) if json else inspection.text)
    problems = (*inspection.problems, *inspection.other_problems)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems and not json:
        print(inspection.coverage.sentences)
    if compare and problems:
        print("Nothing was compared: both checkpoints must be whole.", file=sys.stderr)
    return 0 if inspection.is_as_wanted else 1
