"""What every command of the planner refuses with."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn


class RequestError(ValueError):
    """A request that contradicts itself or asks for what is not there; the message says which."""


class RequestParser(ArgumentParser):
    """Refuses an option's value as everything else is refused: by one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage.

        Raises:
            RequestError: Always.
        """
        raise RequestError(f"{message[:1].upper()}{message[1:]}; see --help.")
