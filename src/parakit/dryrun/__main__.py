"""Reads a job a line, runs each in a fork of a process that has imported everything, writes answers."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import msgspec

from megatron_patches.entry import freeze_imports
from parakit.artifacts.dry_run import RankAnswer, RankJob


def main() -> None:
    """Serve until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Megatron prints; only answers may go where answers are read.
    with freeze_imports():
        from parakit.dryrun.run import prepare

        entry = prepare()
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=RankJob)
        os.write(answers, _run_in_fork(entry, job) + b"\n")


def _run_in_fork(entry: ModuleType, job: RankJob) -> bytes:
    """Run a job in a fork and return its encoded answer.

    Megatron's state is global, so that a process can be one rank only.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        from parakit.dryrun.run import run_rank

        os.close(receive)
        try:
            answered = RankAnswer(report=run_rank(entry, job))
        except (Exception, SystemExit) as error:
            import traceback

            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            answered = RankAnswer(error=f"{type(error).__name__}: {lines[0]}")
        with os.fdopen(send, "wb") as answer:
            answer.write(msgspec.json.encode(answered))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    signal = f"its process was ended (wait status {status}); free some memory."
    return text or msgspec.json.encode(RankAnswer(error=signal))


if __name__ == "__main__":
    main()
