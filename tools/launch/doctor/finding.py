"""What a check found, and how other programs are asked."""

import subprocess
from pathlib import Path
from typing import NamedTuple

PASS, WARN, FAIL = "pass", "warn", "fail"

ROOT = str(Path(__file__).resolve().parents[3])


class Finding(NamedTuple):
    """One row of the table."""

    status: str
    what: str
    found: str
    fix: str = ""
    """The way to a pass, or what works without one."""
    value: "float | None" = None
    """What was measured, where two machines will not find the very same."""


class Answer(NamedTuple):
    """Of another program; `code` is None where it is missing or did not answer in time."""

    code: "int | None"
    out: str
    problem: str
    """The first line of what it complained about."""

    @property
    def good(self) -> bool:
        """Whether it ended well."""
        return self.code == 0


def ask(command: "list[str]", seconds: float = 20.0) -> Answer:
    """Run a program and take its answer; never raises for what the program does."""
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
        return Answer(None, "", error.strerror or str(error))
    with process:
        try:
            out, complaint = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return Answer(None, "", f"no answer within {seconds:.0f} s")
    return Answer(process.returncode, _text(out), _first_line(complaint) or _first_line(out))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").strip()


def _first_line(raw: bytes) -> str:
    lines = _text(raw).splitlines()
    return lines[0] if lines else ""
