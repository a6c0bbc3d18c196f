"""`python -m tools.report scrape|build|explain|trace|bench`."""

from tools.report.cli import main
from tools.text.terminal import exit_with

if __name__ == "__main__":
    exit_with(main)
