"""The result of a check, and how a check runs other programs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PASS, WARN, FAIL = "pass", "warn", "fail"
"""Nothing is missing; some runs are refused or slower; no run works."""

ROOT = str(Path(__file__).resolve().parents[4])
GIB = 2**30
SETUP_STAMP = ".requirements.sha256"
"""In `.venv`: what `tools/setup.sh` writes when all packages are installed."""


class CheckResult(NamedTuple):
    """One row of the doctor's table, or a reason to refuse a run."""

    status: str
    subject: str
    finding: str
    """A clause that can open a sentence, where the result is no pass."""
    fix: str = ""
    """How to fix it, or what works without."""
    value: "float | None" = None
    """A measured value, where two machines never give exactly the same."""

    @property
    def refusal(self) -> str:
        """What was found and the fix, as one sentence."""
        return self.finding + "; " + self.fix + "."


def pass_or_warn(what: str, found: str, fix: str = "", value: "float | None" = None) -> CheckResult:
    """A pass, or a warning where there is something to fix."""
    return CheckResult(WARN if fix else PASS, what, found, fix, value)


class CommandOutput(NamedTuple):
    """Of another program; `code` is None where it is missing or timed out."""

    code: "int | None"
    out: str
    problem: str
    """The first line of its error output, else of its output; of a traceback the exception."""

    @property
    def succeeded(self) -> bool:
        """Whether it succeeded."""
        return self.code == 0


def run_program(command: "list[str]", seconds: float = 20.0) -> CommandOutput:
    """Run a program and return its output; never raises for what the program does."""
    try:
        # As run() would, but `capture_output` is newer than 3.6.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return CommandOutput(None, "", error.strerror or str(error))
    with process:
        try:
            out, complaint = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return CommandOutput(None, "", f"no answer within {seconds:.0f} s")
    return CommandOutput(process.returncode, _text(out), _first_line(complaint) or _first_line(out))


def refusal_sentences(results: "list[CheckResult]") -> "list[str]":
    """The results that are no pass, a sentence each."""
    return [result.refusal for result in results if result.status != PASS]


def image_tag() -> "str | None":
    """Tag of the kit's image that this runs in, which `docker/Dockerfile` sets; None outside of it."""
    return os.environ.get("KIT_IMAGE") or None


def kit_python() -> "str | None":
    """The Python with the kit's packages: the image's own, else `.venv`'s; None before setup ended."""
    if image_tag():
        return sys.executable
    venv = Path(ROOT, ".venv")
    python = venv / "bin" / "python"
    return str(python) if python.exists() and (venv / SETUP_STAMP).is_file() else None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").strip()


def _first_line(raw: bytes) -> str:
    lines = _text(raw).splitlines() or [""]
    return lines[-1 if lines[0].startswith("Traceback ") else 0]
