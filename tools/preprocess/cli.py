"""The command line of `python -m tools.preprocess`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tools.preprocess.errors import PreprocessError

COMMANDS = {
    "run": "make data sets from text (also without a command)",
    "sample": "make the sample data set from prose that Python carries",
    "merge": "join data sets, in order",
    "verify": "check every byte of a data set",
    "stats": "describe a data set",
    "bench": "measure against other tools",
}
INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run a command, or without one make data sets from `--input`; the exit status."""
    name, rest = "run", list(arguments)
    if rest and rest[0] in COMMANDS:
        name = rest.pop(0)
    elif rest in (["-h"], ["--help"]):
        _list_commands()
    # Each command imports only what it needs: verify runs without a tokenizer.
    command = importlib.import_module(f"tools.preprocess.commands.{name}")
    parser = argparse.ArgumentParser(
        prog="python -m tools.preprocess" + ("" if name == "run" else f" {name}"),
        description=command.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_flags(parser)
    try:
        status: int = command.run(parser.parse_args(rest))
    except PreprocessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last commit.", file=sys.stderr)
        return INTERRUPTED
    return status


def _list_commands() -> None:
    print("commands:", *(f"  {name:8} {what}" for name, what in COMMANDS.items()), "", sep="\n")
