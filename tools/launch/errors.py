"""What stops a launch before anything starts or is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tools.spec.setting import SettingError


class LaunchError(Exception):
    """One sentence that names the thing, the value and the fix."""


@contextmanager
def wrong_settings_refused() -> Iterator[None]:
    """A variable that is not of its kind stops the launch as every other refusal does."""
    try:
        yield
    except SettingError as error:
        raise LaunchError(str(error)) from None
