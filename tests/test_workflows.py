"""Workflows and the action execute no text from a caller or a pull request."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from parakit.config.files import ROOT

ACTION = ROOT / ".github/actions/verify/action.yml"
FILES = sorted(file for file in (ROOT / ".github").rglob("*.y*ml") if "TEMPLATE" not in str(file))
PROPER = {"STRATEGIES": "tp2 dp2-zero1", "MODEL_NAME": "gpt2-tiny", "DEVICES": "2", "MINUTES": "10"}


def _steps(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every mapping of a workflow or action that has a `run:` block."""
    if isinstance(node, dict):
        if isinstance(node.get("run"), str):
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _steps(child)


def _run_action(folder: Path, inputs: dict[str, str]) -> tuple[int, str, list[str]]:
    """Run the action's step with a fake `make` and return exit code, output and the targets of make."""
    (step,) = _steps(yaml.safe_load(ACTION.read_text()))
    assert step["shell"] == "bash"
    make = folder / "make"
    make.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >> targets\n')
    make.chmod(0o755)
    (folder / "step.sh").write_text(step["run"])
    ended = subprocess.run(
        ("bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"),
        cwd=folder,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "GITHUB_OUTPUT": "output", **inputs},
        capture_output=True,
        text=True,
        check=False,
    )
    targets = folder / "targets"
    lines = targets.read_text().splitlines() if targets.exists() else []
    return ended.returncode, ended.stdout + ended.stderr, lines


def test_run_blocks_contain_no_expressions() -> None:
    assert ACTION in FILES
    blocks = [step["run"] for file in FILES for step in _steps(yaml.safe_load(file.read_text()))]
    assert len(blocks) >= 8
    assert [block for block in blocks if "${{" in block] == []


def test_the_action_verifies_each_strategy(tmp_path: Path) -> None:
    code, output, targets = _run_action(tmp_path, PROPER)
    assert code == 0, output
    assert targets == ["setup", "verify-tp2-gpt2-tiny-2cpu", "verify-dp2-zero1-gpt2-tiny-2cpu"]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("STRATEGIES", "tp2;touch${IFS}hit"),
        ("STRATEGIES", "x:=$(shell touch hit)"),
        ("STRATEGIES", "$(touch hit)"),
        ("STRATEGIES", "*"),
        ("STRATEGIES", ""),
        ("MODEL_NAME", "gpt2-tiny`touch hit`"),
        ("MODEL_NAME", "x:=$(shell touch hit)"),
        ("MODEL_NAME", "../x"),
        ("DEVICES", "2cpu;touch hit;"),
        ("DEVICES", "two"),
        ("MINUTES", "a[$(touch hit)]"),
        ("MINUTES", "08"),
    ],
)
def test_the_action_refuses_an_input_that_is_no_name_or_number(
    variable: str, text: str, tmp_path: Path
) -> None:
    code, output, targets = _run_action(tmp_path, PROPER | {variable: text})
    assert code == 2, output
    assert output.startswith("::error::The input ")
    assert output.count("\n") == 1
    assert targets == []
    assert not (tmp_path / "hit").exists()
