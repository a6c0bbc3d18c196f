"""Patch file (`PATCH_FILE=`) that records which files of Megatron a rank executes any function of.

The rank appends the files to `<process id>.txt` in the folder that the variable EXECUTED names.
"""

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
    """Record the file of a function that starts, and return DISABLE.

    DISABLE ends the events of this function, so that an iteration takes about as long as without the recording.
    """
    start = code.co_filename.rfind(MEGATRON_FOLDER)
    if start >= 0 and code.co_filename not in _noted_files:
        _noted_files.add(code.co_filename)
        path = Path(os.environ[variables.EXECUTED]) / f"{os.getpid()}.txt"
        with path.open("a") as file:  # At once: a rank may be killed before its exit handlers run.
            file.write(code.co_filename[start + 1 :] + "\n")
    return sys.monitoring.DISABLE


if variables.EXECUTED in os.environ:
    sys.monitoring.use_tool_id(TOOL, "executed")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, _note_function)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)
