"""The result of a check, and the function by which checks run other programs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PASS, WARN, FAIL = "pass", "warn", "fail"
"""Statuses of a result: nothing is missing; some runs are refused or slower; no run works."""

ROOT = str(Path(__file__).resolve().parents[4])
GIB = 2**30
SETUP_STAMP = ".requirements.sha256"
"""The file in `.venv` that `tools/setup.sh` writes once all packages are installed."""


class CheckResult(NamedTuple):
    """One row of the doctor's table, or a reason to refuse a run."""

    status: str
    subject: str
    """The thing that was checked, such as `Disk`."""
    finding: str
    """What was found, as a clause that can begin a sentence."""
    fix: str = ""
    """How to fix the problem, or what works without a fix."""
    value: "float | None" = None
    """A measured value. Two machines never have exactly the same, so nodes are compared with their median."""

    @property
    def refusal(self) -> str:
        """The finding and the fix as one sentence."""
        return self.finding + "; " + self.fix + "."


def pass_or_warn(
    subject: str, finding: str, fix: str = "", value: "float | None" = None
) -> CheckResult:
    """Return a warning if there is something to fix, else a pass."""
    return CheckResult(WARN if fix else PASS, subject, finding, fix, value)


class CommandOutput(NamedTuple):
    """The output of another program."""

    code: "int | None"
    """The exit code; None if the program is missing or did not answer in time."""
    out: str
    problem: str
    """The first line of stderr, else of stdout; of a traceback the last line, which is the exception."""

    @property
    def succeeded(self) -> bool:
        """True if the program ended with 0."""
        return self.code == 0


def run_program(command: "list[str]", seconds: float = 20.0) -> CommandOutput:
    """Run a program in the repository's root and return its output; raise nothing if it fails.

    Args:
        command: The program and its arguments.
        seconds: The time after which the program is killed.
    """
    try:
        # `subprocess.run(capture_output=True)` is newer than Python 3.6.
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
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return CommandOutput(None, "", f"no answer within {seconds:.0f} s")
    problem = _first_line(err) or _first_line(out)
    return CommandOutput(process.returncode, _decode(out), problem)


def refusal_sentences(results: "list[CheckResult]") -> "list[str]":
    """Return a sentence for each result that is no pass."""
    return [result.refusal for result in results if result.status != PASS]


def image_tag() -> "str | None":
    """Return the tag of the kit's image in which this process runs; None outside of an image.

    `docker/Dockerfile` sets the variable.
    """
    return os.environ.get("KIT_IMAGE") or None


def kit_python() -> "str | None":
    """Return the Python that has the kit's packages: the image's, else `.venv`'s; None before setup has ended."""
    if image_tag():
        return sys.executable
    venv = Path(ROOT, ".venv")
    python = venv / "bin" / "python"
    return str(python) if python.exists() and (venv / SETUP_STAMP).is_file() else None


def _decode(raw: bytes) -> str:
    """Return output as text without surrounding white space."""
    return raw.decode("utf-8", "replace").strip()


def _first_line(raw: bytes) -> str:
    """Return the first line of output; of a traceback the last line, which is the exception."""
    lines = _decode(raw).splitlines() or [""]
    is_traceback = lines[0].startswith("Traceback ")
    return lines[-1] if is_traceback else lines[0]
