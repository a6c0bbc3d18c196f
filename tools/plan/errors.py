"""What every command of the planner refuses with."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that contradicts itself or asks for what is not there; the message says which."""
