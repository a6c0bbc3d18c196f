"""`python -m tools.preprocess`."""

import sys

from tools.preprocess.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
