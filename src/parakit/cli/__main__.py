"""`python -m parakit TARGET [WORDS…]`: what the Makefile and the launch scripts call."""

import sys

from parakit.formatting.terminal import exit_with


def main() -> int:
    """Run the command; imported here, so that Ctrl-C ends imports as it ends a command."""
    from parakit.cli.main import from_make

    return from_make(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    exit_with(main)
