"""What stops a launch before anything starts or is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tools.records.run import RUN_FILE, RunRecord, read_run
from tools.spec.files import from_root
from tools.spec.setting import SettingError
from tools.spec.strategy import StrategyError


class LaunchError(Exception):
    """One sentence that names the thing, the value and the fix."""


@contextmanager
def wrong_settings_refused() -> Iterator[None]:
    """A variable that is not of its kind stops the launch as every other refusal does."""
    try:
        yield
    except SettingError as error:
        raise LaunchError(str(error)) from None


@contextmanager
def wrong_strategies_refused(given: str = "") -> Iterator[None]:
    """A strategy that is none, or does not fit its devices, stops the launch likewise.

    `given` says where it was given, such as `STRATEGY=dp3`, if the error does not.
    """
    try:
        yield
    except StrategyError as error:
        raise LaunchError(f"{given}: {error}" if given else str(error)) from None


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
