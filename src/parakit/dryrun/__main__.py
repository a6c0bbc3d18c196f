"""The process of the dry run: it reads one job per line and writes one answer per job.

Each job runs in a fork of this process, which has imported everything.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

import msgspec

from megatron_patches.entry import freeze_imports
from parakit.artifacts.dry_run import RankAnswer, RankJob


def main() -> None:
    """Read one job per line from stdin, run it, and write one answer per line to stdout, until the input ends.

    Everything that Megatron prints goes to stderr.
    """
    answers = os.dup(1)
    # Megatron prints to stdout, where the planner reads answers. Its lines go to stderr instead.
    os.dup2(2, 1)
    with freeze_imports():
        from parakit.dryrun.run import prepare

        entry = prepare()
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=RankJob)
        os.write(answers, _run_in_fork(entry, job) + b"\n")


def _run_in_fork(entry: ModuleType, job: RankJob) -> bytes:
    """Run a job in a forked process, and return the encoded answer.

    Megatron's state is global, so a process can be only one rank. If the forked process ends without an answer, the
    returned answer has an error.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        with os.fdopen(send, "wb") as pipe:
            pipe.write(msgspec.json.encode(_answer_job(entry, job)))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = f"its process was ended (wait status {status}); free some memory."
    return text or msgspec.json.encode(RankAnswer(error=killed))


def _answer_job(entry: ModuleType, job: RankJob) -> RankAnswer:
    """Run a job in this process, and return an answer with the job's report or with the first line of its error.

    The full traceback of an error is printed.
    """
    from parakit.dryrun.run import run_rank

    try:
        return RankAnswer(report=run_rank(entry, job))
    except (Exception, SystemExit) as error:
        import traceback

        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        return RankAnswer(error=f"{type(error).__name__}: {lines[0]}")


if __name__ == "__main__":
    main()
