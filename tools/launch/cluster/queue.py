"""What Slurm says of the caller's jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.records.run import Status

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


@dataclass(frozen=True)
class JobState:
    """Of one job."""

    state: str
    """Slurm's word, such as `PENDING`."""
    reason: str = ""

    @property
    def waits(self) -> bool:
        """Whether it will run, but does not yet."""
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        """Whether it has nodes."""
        return self.state in RUNNING


def job_states(job_ids: Sequence[str]) -> dict[str, JobState] | None:
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


def _parse(text: str) -> dict[str, JobState]:
    rows = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    # sacct writes 'CANCELLED by 1000'.
    return {job: JobState(state.split()[0], reason) for job, state, reason in rows if state}


def _ask(*command: str) -> str | None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ASK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None
