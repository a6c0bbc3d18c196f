"""Workflows and the action execute no text from a caller or a pull request."""

from __future__ import annotations

import os
import re
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


def test_every_action_is_pinned_by_commit_and_every_program_by_version() -> None:
    texts = {file.name: file.read_text() for file in FILES}
    uses = re.findall(
        r"uses: (\S+)(?: +# (v\d+\.\d+\.\d+))?$", "\n".join(texts.values()), re.MULTILINE
    )
    assert len(uses) >= 8
    for action, version in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert version, action
    guide = (ROOT / "docs" / "verify-in-ci.md").read_text()
    assert re.findall(r"uses: \S+@v\d", guide) == []
    programs = re.findall(r"npx (?:--yes )?(\S+)", "\n".join(texts.values()))
    assert programs
    assert all(re.fullmatch(r"\w+@\d+\.\d+\.\d+", program) for program in programs)


def test_dependabot_proposes_newer_actions_and_packages() -> None:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip"}


def test_a_weekly_job_tries_the_newest_megatron_and_may_only_open_issues() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "freshness.yml").read_text())
    # PyYAML reads the key `on` as True.
    assert workflow[True]["schedule"] == [{"cron": "17 3 * * 1"}]
    assert workflow["jobs"]["try"]["strategy"]["matrix"] == {"megatron": ["wheel", "main"]}
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["report"]["permissions"] == {"issues": "write"}


@pytest.mark.parametrize(("bad", "code"), [("", 0), ("verify-cp2-gpt2-tiny-2cpu", 1)])
def test_freshness_names_each_strategy_and_fails_if_one_differs(
    tmp_path: Path, bad: str, code: int
) -> None:
    kit = tmp_path / "kit"
    (kit / "tools").mkdir(parents=True)
    (kit / "tools" / "freshness.sh").symlink_to(ROOT / "tools" / "freshness.sh")
    for name, text in {
        "make": f'echo "$1: Megatron {{a | b}}"; [ "$1" != "{bad}" ] || exit 1',
        "git": 'echo "${@: -1}"',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    ended = subprocess.run(
        ("tools/freshness.sh", "main", "verdict.md"),
        cwd=kit,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    verdict = (kit / "verdict.md").read_text()
    assert verdict.startswith("## Megatron-LM main at HEAD\n")
    rows = re.findall(r"^\| (\w+) \| (.+) \|$", verdict, re.MULTILINE)[1:]
    assert [strategy for strategy, _ in rows] == ["dp2", "tp2", "sp2", "cp2", "pp2", "vpp2"]
    failures = {strategy: text for strategy, text in rows if text != "held"}
    assert set(failures) == ({"cp2"} if bad else set())
    assert all(
        "exit code 1: verify-cp2-gpt2-tiny-2cpu: Megatron {a / b}" in t for t in failures.values()
    )
