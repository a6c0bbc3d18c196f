"""The run that `RUN=` names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.records.run import RUN_FILE, RunRecord, read_run
from tools.spec.errors import LaunchError
from tools.spec.files import from_root


def read_named_run(folder: Path, otherwise: str = "") -> RunRecord:
    """The record of the run that `RUN=` names.

    Args:
        folder: The run's.
        otherwise: What may be named in its place, the end of a sentence.

    Raises:
        LaunchError: It is no run folder, or one of another version of the kit.
    """
    try:
        return read_run(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise LaunchError(
            f"RUN={from_root(folder)} is no run folder: it has no {RUN_FILE}; 'ls runs' shows "
            f"them{otherwise}."
        ) from None
    except msgspec.DecodeError as error:
        raise LaunchError(
            f"{folder / RUN_FILE} is not of this version of the kit ({error})."
        ) from None
