"""`python -m tools.report scrape|build|explain|trace|bench`."""

import sys

from tools.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
