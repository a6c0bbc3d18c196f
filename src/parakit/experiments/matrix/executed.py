"""`PATCH_FILE=` of a recording: notes the files of Megatron of which a rank executes any function."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType

from parakit.config import variables

TOOL = sys.monitoring.COVERAGE_ID
MEGATRON_FOLDER = "/megatron/"
_noted_files: set[str] = set()


def _note_function(code: CodeType, _: int) -> object:
    """Called once for each function: DISABLE ends its events, so that a step costs what it does."""
    at = code.co_filename.rfind(MEGATRON_FOLDER)
    if at >= 0 and code.co_filename not in _noted_files:
        _noted_files.add(code.co_filename)
        mine = Path(os.environ[variables.EXECUTED]) / f"{os.getpid()}.txt"
        with mine.open("a") as file:  # Ranks may end without a last word.
            file.write(code.co_filename[at + 1 :] + "\n")
    return sys.monitoring.DISABLE


if variables.EXECUTED in os.environ:
    sys.monitoring.use_tool_id(TOOL, "executed")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, _note_function)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)
