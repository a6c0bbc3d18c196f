"""`python -m tools.cli TARGET [WORDS…]`: what the Makefile and the launch scripts call."""

import sys

from tools.cli.main import from_make
from tools.text.terminal import exit_with

if __name__ == "__main__":
    exit_with(lambda: from_make(sys.argv[1], sys.argv[2:]))
