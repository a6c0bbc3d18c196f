"""What stops a launch before anything starts or is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
