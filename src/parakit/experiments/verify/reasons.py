"""Shorten and normalise the reasons with which runs of a verification fail."""

from __future__ import annotations

import re

_PATHS_AND_NUMBERS = re.compile(r"\S*/\S*|\d+")
_LOG_PATH = re.compile(r" The log is \S+$")
"""The end of a reason by `ForkedRanks.run`."""


def strip_paths_and_numbers(reason: str) -> str:
    """Return a reason without paths and numbers, which differ between two runs that fail for the same reason."""
    return _PATHS_AND_NUMBERS.sub("", reason)


def shorten_reason(reason: str, max_length: int) -> str:
    """Return a reason without the name of its log, which is removed with the run; at most `max_length` characters."""
    return _LOG_PATH.sub("", reason)[:max_length]
