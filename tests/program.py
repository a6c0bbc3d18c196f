"""The program `parakit` as tests call it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from parakit.cli.program import main


def run_plan(arguments: Sequence[str]) -> int:
    """Run `parakit plan ARGUMENTS` in this process and return its exit code."""
    return main(["plan", *arguments])


def run_report(arguments: Sequence[str]) -> int:
    """Run `parakit report ARGUMENTS` in this process and return its exit code."""
    return main(["report", *arguments])


def printed_json(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `parakit ARGUMENTS --json` in this process and return what it prints as data."""
    capsys.readouterr()
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)
