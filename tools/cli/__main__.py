"""`python -m tools.cli TARGET [WORDS…]`: what the Makefile and the launch scripts call."""

import sys

from tools.text.terminal import exit_with


def main() -> int:
    """Run the command; imported here, so that Ctrl-C ends imports as it ends a command."""
    from tools.cli.main import from_make

    return from_make(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    exit_with(main)
