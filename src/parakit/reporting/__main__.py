"""`python -m parakit report|scrape|explain …`: the report's commands."""

import sys

from parakit.cli.main import run_tool
from parakit.formatting.terminal import exit_with


def main(words: list[str] | None = None) -> int:
    """Run a command; its exit code, 2 if it was refused."""
    given = sys.argv[1:] if words is None else words
    # `build` is what the command was called here.
    return run_tool(
        "parakit.reporting", given[1:] if given[:1] == ["build"] else given, usual="report"
    )


if __name__ == "__main__":
    exit_with(main)
