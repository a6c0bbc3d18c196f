"""Run the kit's commands in this process, as `python -m …` would, and compare their output with golden files.

Only public commands are named here, so that these tests survive every move of a module. Regenerate all
golden files, then read what `git diff tests/golden` shows:

    UPDATE_GOLDEN=1 .venv/bin/python -m pytest -q tests/golden
"""

from __future__ import annotations

import difflib
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from parakit.config import model

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
UPDATE = "UPDATE_GOLDEN"
ADVICE = f"""
If this change is wanted: {UPDATE}=1 .venv/bin/python -m pytest -q tests/golden
and list it as an improvement where the change is described.
"""

_FREE_BYTES = 16 << 30
_FREE_DISK_BYTES = 1 << 40
BASE_ENVIRONMENT = {"COLUMNS": "100", "LANG": "C.UTF-8"}


class Commands:
    """Runner of commands, each with a separate environment."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], programs: Path
    ) -> None:
        self._monkeypatch, self._capfd, self._programs = monkeypatch, capfd, programs

    def run(self, command: Sequence[str], environment: Mapping[str, str] = {}) -> tuple[int, str]:
        """Return exit code and output of `python -m MODULE ARGUMENTS`, with errors after the output."""
        self._capfd.readouterr()
        with self._monkeypatch.context() as patch:
            for name in os.environ:
                patch.delenv(name)
            for name, value in {
                "PATH": str(self._programs),
                **BASE_ENVIRONMENT,
                **environment,
            }.items():
                patch.setenv(name, value)
            patch.chdir(ROOT)
            patch.setattr(os, "execve", _run_launch_script)
            # Other processes of this machine must not change the output.
            memory = psutil.virtual_memory()._replace(available=_FREE_BYTES)
            patch.setattr(psutil, "virtual_memory", lambda: memory)
            disk = shutil.disk_usage(ROOT)._replace(free=_FREE_DISK_BYTES)
            patch.setattr(shutil, "disk_usage", lambda folder: disk)
            patch.setattr(model, "HUB", ROOT / "no models are imported")
            code = _run_module(command)
        printed = self._capfd.readouterr()
        return code, printed.out + printed.err


def _run_module(command: Sequence[str]) -> int:
    module, *arguments = command
    before = sys.argv
    sys.argv = [module, *arguments]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*found in sys.modules after import of package.*")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def _run_launch_script(path: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    # Instead of exec, the arguments that the script calls are run in this process.
    answer = subprocess.run(
        [path, *command[1:]],
        env={**environment, "KIT_PYTHON": "/bin/echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    dash_m, *module_and_arguments = answer.stdout.split()
    assert dash_m == "-m"
    print(f"{command[0]}:")
    sys.exit(_run_module(module_and_arguments))


def normalised(text: str, **places: Path) -> str:
    """Return the text without values of this machine or moment, and with one flag of a command per line."""
    for name, path in {**places, "kit": ROOT}.items():
        text = text.replace(str(path), f"<{name}>")
    python = os.path.relpath(sys.executable, ROOT) if sys.executable else ".venv/bin/python"
    for interpreter in (sys.executable, python):
        text = text.replace(interpreter, ".venv/bin/python")
    text = text.replace("<kit>/.venv/bin/python", ".venv/bin/python")
    text = re.sub(r"--user \d+:\d+", "--user <uid>:<gid>", text)
    text = re.sub(r"\d{8}T\d{6}Z", "<time>", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?Z?", "<date>", text)
    text = re.sub(r"(kit-\w+)-\d+", r"\1-<pid>", text)
    return "\n".join(_reflowed(line).rstrip() for line in text.splitlines()).strip("\n")


def _reflowed(line: str) -> str:
    is_long_command = line.count(" --") > 6
    return re.sub(r" (?=--?[a-z])", "\n    ", line) if is_long_command else line


def check_golden(path: Path, text: str) -> None:
    """Compare with a golden file, or write it when `UPDATE_GOLDEN` is set."""
    text = text.rstrip("\n") + "\n"
    if os.environ.get(UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != expected:
        name = str(path.relative_to(ROOT))
        lines = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), name, "now", lineterm=""
        )
        pytest.fail("\n".join(list(lines)[:200]) + ADVICE, pytrace=False)
