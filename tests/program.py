"""The program `parakit` as tests call it."""

from __future__ import annotations

from collections.abc import Sequence

from parakit.cli.program import main


def run_plan(arguments: Sequence[str]) -> int:
    """Run `parakit plan ARGUMENTS` in this process and return its exit code."""
    return main(["plan", *arguments])


def run_report(arguments: Sequence[str]) -> int:
    """Run `parakit report ARGUMENTS` in this process and return its exit code."""
    return main(["report", *arguments])
