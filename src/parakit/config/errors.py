"""The error that stops a launch before anything is started or written, and suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_SUGGESTIONS = 3
_LEAST_SIMILARITY = 0.4
"""Similarity of a suggested name, at least, from 0 to 1."""


class LaunchError(ValueError):
    """A launch that is refused; the message is one sentence that names the thing, the value and the
    fix.
    """


def suggest_names(name: str, known: Iterable[str], listing: str) -> str:
    """Return the last clause of an error about an unknown name, such as `did you mean tp2 or sp2?`.

    Args:
        name: The unknown name.
        known: All names that exist.
        listing: Clause that says where all names are listed. It is the result if no name is similar.
    """
    similar = difflib.get_close_matches(
        name, list(known), n=_MOST_SUGGESTIONS, cutoff=_LEAST_SIMILARITY
    )
    return f"did you mean {' or '.join(similar)}?" if similar else f"{listing}."
