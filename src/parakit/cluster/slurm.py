"""What Slurm is asked for, and what it says of the caller's jobs.

`LAUNCHER=slurm NODES=2` asks for a job; variables or a site file say the rest.
"""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.artifacts.run import Status
from parakit.cluster.checks.result import run_program
from parakit.config import settings
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT

SITE_FILE = "site.slurm"
"""Of the repository's root; taken if it is there. `SLURM_SITE=` names another."""

ASK_SECONDS = 30.0

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")
ENDINGS: Mapping[str, tuple[Status, str]] = {
    "CANCELLED": (Status.INTERRUPTED, "was cancelled in Slurm"),
    "TIMEOUT": (Status.INTERRUPTED, "reached its time limit; ask for more with SLURM_TIME="),
    "DEADLINE": (Status.INTERRUPTED, "reached its deadline"),
    "PREEMPTED": (Status.INTERRUPTED, "was preempted"),
    "NODE_FAIL": (Status.CRASHED, "lost a node"),
    "BOOT_FAIL": (Status.CRASHED, "was given a node that did not boot"),
    "OUT_OF_MEMORY": (Status.OUT_OF_MEMORY, "ran out of the memory that Slurm gave it"),
}
"""States that say why a job ended, and what its run is then, unless the run itself says better."""

STOPPED_BY_SLURM = ("TIMEOUT", "DEADLINE", "PREEMPTED")
"""Of these a launcher hears no more than a request to stop."""

_VALUE = re.compile(r"[\w.,:+@/=-]+")
_SPECIAL = re.compile(r"""[\s"'\\#]""")
_DIRECTIVE = "#SBATCH"


@dataclass(frozen=True)
class Slurm:
    """How jobs are asked for."""

    nodes: int = 1
    directives: tuple[str, ...] = ()
    """As `#SBATCH` takes them, quoted; the site's lines first, so that a variable overrides them."""
    setup: tuple[str, ...] = ()
    """Lines of shell from the site file, run on the first node: modules, variables of the fabric."""
    image: str | None = None
    """For Pyxis: a squash file, or whatever else `--container-image` takes."""


def parse_slurm_options(given: Namespace) -> Slurm | None:
    """LAUNCHER=slurm with NODES=, SLURM_PARTITION= and its like; None if Slurm was not asked for.

    Raises:
        LaunchError: A value is not of its kind, or the site file cannot be read.
    """
    if getattr(given, "launcher", None) != "slurm":
        return None
    site, setup = _read_site(given.slurm_site)
    own = tuple(
        f"--{setting.name.removeprefix('SLURM_').lower()}={_checked(setting.name, value)}"
        for setting in settings.SLURM_RESOURCES
        if (value := getattr(given, setting.name.lower()))
    )
    return Slurm(
        nodes=given.nodes or 1,
        directives=(*site, *own, *_lines(given.slurm_lines or "")),
        setup=setup,
        image=given.slurm_image,
    )


def split_directives(directives: Sequence[str]) -> tuple[str, ...]:
    """Lines of `#SBATCH` as words of a command.

    Raises:
        ValueError: Quotes do not end.
    """
    return tuple(word for line in directives for word in shlex.split(line, comments=True))


@dataclass(frozen=True)
class JobState:
    """Of one job."""

    state: str
    """Slurm's word, such as `PENDING`."""
    reason: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it will run, but does not yet."""
        return self.state in WAITING

    @property
    def is_running(self) -> bool:
        """Whether it has nodes."""
        return self.state in RUNNING


def query_job_states(job_ids: Sequence[str]) -> dict[str, JobState] | None:
    """By job; those that Slurm no longer knows are missing. None if it did not answer."""
    if not job_ids:
        return {}
    listed = _ask("squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i|%T|%r")
    if listed is None:
        return None
    found = _parse(listed)
    missing = [job for job in job_ids if job not in found]
    if missing:
        # Without accounting, and with it ailing, the queue's word alone has to do.
        asked = ("--allocations", "--noheader", "--parsable2", "--format=JobID,State,Reason")
        found |= _parse(_ask("sacct", *asked, "--jobs", ",".join(missing)) or "")
    return {job: found[job] for job in job_ids if job in found}


def cancel_job(job_id: str) -> bool:
    """Ask Slurm to end a job: its launcher gets SIGTERM first; whether Slurm took the request."""
    return _ask("scancel", job_id) is not None


def _checked(name: str, value: str) -> str:
    if _VALUE.fullmatch(value) is None:
        raise LaunchError(f"{name}={value} is not a word that sbatch takes.")
    return value


def _lines(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError:
        words = [""]
    for word in words:
        if not word.startswith("--") or "\n" in word:
            raise LaunchError(
                f"SLURM_LINES={text} is not a list of sbatch's long options, such as "
                "'--exclusive --constraint=h200'."
            )
    return tuple(map(_quote_directive, words))


def _quote_directive(word: str) -> str:
    """As a line of `#SBATCH`: a backslash escapes in any quotes there, and `#` begins a comment."""
    if _SPECIAL.search(word) is None:
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _read_site(named: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    path = Path(named).expanduser() if named else ROOT / SITE_FILE
    if not named and not path.exists():
        return (), ()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"SLURM_SITE={path} cannot be read ({error}).") from None
    directives = tuple(
        line.removeprefix(_DIRECTIVE).strip() for line in lines if line.startswith(_DIRECTIVE)
    )
    try:
        split_directives(directives)
    except ValueError as error:
        raise LaunchError(f"SLURM_SITE={path} has a wrong #SBATCH line ({error}).") from None
    setup = tuple(line for line in lines if line and not line.startswith(("#!", _DIRECTIVE)))
    return directives, setup


def _parse(text: str) -> dict[str, JobState]:
    rows = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    # sacct writes 'CANCELLED by 1000'.
    return {job: JobState(state.split()[0], reason) for job, state, reason in rows if state}


def _ask(*command: str) -> str | None:
    answer = run_program(list(command), ASK_SECONDS)
    return answer.out if answer.succeeded else None
