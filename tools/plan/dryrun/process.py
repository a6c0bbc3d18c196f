"""The dry run's own process, which imports torch and Megatron once and then answers job by job."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType
from typing import Self

import msgspec

from tools.plan.dryrun.job import Answer, DryRunError, Job, RankReport
from tools.spec.files import ROOT

_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "KIT_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # What Megatron asks for with TP, and no JIT: it would compile.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


class DryRunner:
    """Runs jobs one after another in a process of its own, for as long as the `with` block."""

    def __init__(self, *, verbose: bool = False) -> None:
        """`verbose` lets Megatron's own lines through to stderr."""
        self._verbose = verbose

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.plan.dryrun.rank"],
            cwd=ROOT,
            env={**_without_ledger(), **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._verbose else subprocess.DEVNULL,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Closing its input ends the process; after an error it may be in the middle of a job.
        if kind is not None:
            self._process.kill()
        self._process.communicate()

    def run(self, job: Job) -> RankReport:
        """One rank.

        Raises:
            DryRunError: Megatron refused or failed; the message is its last one.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(msgspec.json.encode(job) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        answer = msgspec.json.decode(line, type=Answer) if line else Answer(error=_DIED)
        if answer.report is None:
            raise DryRunError(f"The dry run of rank {job.rank} failed: {answer.error}")
        return answer.report


_DIED = "its process ended without an answer; --verbose shows what it printed."


def _without_ledger() -> dict[str, str]:
    """This environment without what would start a real run's ledger or weights."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KIT_")}
