"""What stops a launch before anything starts or is written."""

from __future__ import annotations


class LaunchError(Exception):
    """One sentence that names the thing, the value, and the way out."""
