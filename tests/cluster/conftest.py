"""Fake Slurm commands on PATH."""

import os
from pathlib import Path

import pytest


def program(folder: Path, name: str, line: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{line}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    program(
        folder, "sbatch", f'cp "${{@: -1}}" {folder}/submitted; env > {folder}/env; echo "12;kit"'
    )
    program(folder, "squeue", "exit 0")
    program(folder, "sacct", "exit 1")
    return folder


def run_folders(runs: Path) -> list[Path]:
    return sorted(folder for folder in runs.glob("*") if not folder.name.startswith("."))


@pytest.fixture(autouse=True)
def _quick_clock(quick_clock: None) -> None:
    """Use the fast clock in all tests of this folder."""
