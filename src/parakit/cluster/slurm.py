"""Parse the options of a Slurm job, and ask Slurm about the caller's jobs.

`LAUNCHER=slurm NODES=2` runs a target as a job. Make variables and a site file give further options.
"""

from __future__ import annotations

import difflib
import os
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
"""The site file in the repository's root, read if it exists. `SLURM_SITE=` names another file."""

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
"""Status of the run, and a clause on the reason, by Slurm's state of an ended job.

They are used if the run itself could not record how it ended.
"""

STOPPED_BY_SLURM = ("TIMEOUT", "DEADLINE", "PREEMPTED")
"""States in which the launcher was only asked to stop, without a reason."""

_SET_BY_SLURM = (
    "SLURM_CONF",
    "SLURM_CLUSTERS",
    "SLURM_TIMELIMIT",
    "SLURM_TIME_FORMAT",
    "SLURM_JOB",
)
"""Beginnings of variables that Slurm's own programs read."""
_MISSPELT = 0.85
"""Similarity of two names (`difflib`) from which one counts as a misspelling of the other."""

_VALUE = re.compile(r"[\w.,:+@/=-]+")
_SPECIAL = re.compile(r"""[\s"'\\#]""")
_DIRECTIVE = "#SBATCH"


@dataclass(frozen=True)
class Slurm:
    """The options of a Slurm job."""

    nodes: int = 1
    directives: tuple[str, ...] = ()
    """Options as `#SBATCH` lines have them, quoted. Those of the site come first, so that variables override them."""
    setup: tuple[str, ...] = ()
    """Shell lines of the site file, which run on the first node: modules, variables of the fabric."""
    image: str | None = None
    """The image for Pyxis: a squash file, or another value of `--container-image`; None for the kit's own."""

    @property
    def names_gres(self) -> bool:
        """True if a directive asks for generic resources, so the GPUs of a node need no option of their own."""
        return any(directive.startswith("--gres=") for directive in self.directives)

    @property
    def gpus_per_node(self) -> int | None:
        """The GPUs per node that the last `--gres=` asks for; None without one, and 0 if it names no GPUs.

        `gpu`, `gpu:8`, `gpu:h200:8` and `gpu:h200` are understood; without a number one GPU is meant.
        """
        values = [line for line in self.directives if line.startswith("--gres=")]
        if not values:
            return None
        gpus = 0
        for resource in values[-1].removeprefix("--gres=").strip("\"'").split(","):
            kind, *details = resource.split(":")
            if kind in ("gpu", "gres/gpu"):
                count = details[-1] if details else ""
                gpus += int(count) if count.isdecimal() else 1
        return gpus


def parse_slurm_options(arguments: Namespace) -> Slurm | None:
    """Return the options of a Slurm job from NODES=, SLURM_PARTITION= and the like; None without LAUNCHER=slurm.

    Raises:
        LaunchError: A value is not of its kind, or the site file cannot be read.
    """
    if getattr(arguments, "launcher", None) != "slurm":
        return None
    _refuse_misspelt_variables(os.environ)
    site_directives, setup = _read_site(arguments.slurm_site)
    resource_directives = []
    for setting in settings.SLURM_RESOURCES:
        value = getattr(arguments, setting.name.lower())
        if value:
            option = setting.name.removeprefix("SLURM_").lower()
            resource_directives.append(f"--{option}={_check_value(setting.name, value)}")
    user_directives = _parse_lines(arguments.slurm_lines or "")
    return Slurm(
        nodes=arguments.nodes or 1,
        directives=(*site_directives, *resource_directives, *user_directives),
        setup=setup,
        image=arguments.slurm_image,
    )


def _refuse_misspelt_variables(environment: Mapping[str, str]) -> None:
    """Raise if the environment has a variable whose name is a misspelt name of SLURM_SETTINGS.

    Nothing is checked within a Slurm job, because Slurm sets variables with similar names there.

    Raises:
        LaunchError: There is such a variable, which would have no effect.
    """
    known = {setting.name for setting in settings.SLURM_SETTINGS}
    if "SLURM_JOB_ID" in environment:
        return
    for name in sorted(environment):
        if not name.startswith("SLURM_") or name in known or name.startswith(_SET_BY_SLURM):
            continue
        similar = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_MISSPELT)
        if similar:
            raise LaunchError(f"There is no variable {name}; did you mean {similar[0]}=?")


def split_directives(directives: Sequence[str]) -> tuple[str, ...]:
    """Return the options of `#SBATCH` lines as arguments of a command, without quotes and comments.

    Raises:
        ValueError: A quote does not end.
    """
    return tuple(word for line in directives for word in shlex.split(line, comments=True))


@dataclass(frozen=True)
class JobState:
    """The state of a job, as Slurm reports it."""

    state: str
    """Slurm's name of the state, such as `PENDING`."""
    reason: str = ""
    """Slurm's reason for the state, such as `Resources`."""

    @property
    def is_waiting(self) -> bool:
        """True if the job is to run, but does not run yet."""
        return self.state in WAITING

    @property
    def is_running(self) -> bool:
        """True if the job has nodes."""
        return self.state in RUNNING


def query_job_states(job_ids: Sequence[str]) -> dict[str, JobState] | None:
    """Return the states of jobs as Slurm reports them, by job id; None if Slurm does not answer.

    A job that Slurm no longer knows is missing from the result.
    """
    if not job_ids:
        return {}
    queue_options = ("--me", "--array", "--states=all", "--noheader", "--format=%i|%T|%r")
    queue = _run_slurm("squeue", *queue_options)
    if queue is None:
        return None
    states = _parse_states(queue)
    ended_jobs = [job for job in job_ids if job not in states]
    if ended_jobs:
        options = ("--allocations", "--noheader", "--parsable2", "--format=JobID,State,Reason")
        accounting = _run_slurm("sacct", *options, "--jobs", ",".join(ended_jobs))
        # A cluster without accounting has no sacct. Then the queue alone has to do.
        if accounting is not None:
            states |= _parse_states(accounting)
    return {job: states[job] for job in job_ids if job in states}


def cancel_job(job_id: str) -> bool:
    """Ask Slurm to end a job, whose launcher gets SIGTERM first; return True if Slurm accepts the request."""
    return _run_slurm("scancel", job_id) is not None


def _check_value(name: str, value: str) -> str:
    """Return the value of a make variable, after checking that it needs no quotes in an #SBATCH line.

    Raises:
        LaunchError: The value has a character that needs quotes.
    """
    if _VALUE.fullmatch(value) is None:
        raise LaunchError(f"{name}={value} is not a word that sbatch takes.")
    return value


def _parse_lines(text: str) -> tuple[str, ...]:
    """Return the options in SLURM_LINES=, in the form of #SBATCH lines.

    Raises:
        LaunchError: The text is no list of long options.
    """
    try:
        options = shlex.split(text)
    except ValueError:
        options = [""]
    for option in options:
        if not option.startswith("--") or "\n" in option:
            raise LaunchError(
                f"SLURM_LINES={text} is not a list of sbatch's long options, such as "
                "'--exclusive --constraint=h200'."
            )
    return tuple(map(_quote_directive, options))


def _quote_directive(option: str) -> str:
    """Return an option quoted for an #SBATCH line, where a backslash escapes and `#` begins a comment."""
    if _SPECIAL.search(option) is None:
        return option
    return quote_value(option)


def quote_value(value: str) -> str:
    """Return a value in double quotes, as sbatch reads them in an #SBATCH line."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _read_site(named_file: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the #SBATCH options and the shell lines of the site file; both empty without such a file.

    Args:
        named_file: SLURM_SITE=, which must exist; None reads SITE_FILE if it exists.

    Raises:
        LaunchError: The file cannot be read, or an #SBATCH line is wrong.
    """
    path = Path(named_file).expanduser() if named_file else ROOT / SITE_FILE
    if not named_file and not path.exists():
        return (), ()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"SLURM_SITE={path} cannot be read ({error}).") from None
    directives: list[str] = []
    shell_lines: list[str] = []
    for line in lines:
        if line.startswith(_DIRECTIVE):
            directives.append(line.removeprefix(_DIRECTIVE).strip())
        elif line and not line.startswith("#!"):
            shell_lines.append(line)
    try:
        split_directives(directives)
    except ValueError as error:
        raise LaunchError(f"SLURM_SITE={path} has a wrong #SBATCH line ({error}).") from None
    return tuple(directives), tuple(shell_lines)


def _parse_states(text: str) -> dict[str, JobState]:
    """Return job states by job id from lines `id|state|reason`; other lines are ignored."""
    rows = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    # sacct writes 'CANCELLED by 1000', of which the first word is the state.
    return {job: JobState(state.split()[0], reason) for job, state, reason in rows if state}


def _run_slurm(*command: str) -> str | None:
    """Run a program of Slurm and return its output; None if it fails or does not answer in time."""
    output = run_program(list(command), ASK_SECONDS)
    return output.out if output.succeeded else None
