"""Runs whose ranks are forked from a process that has imported Megatron equal other runs."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import closing

import psutil
import pytest

from parakit.artifacts.measurements import CommunicationRecord, read_measurements
from parakit.artifacts.run import Status
from parakit.experiments.verify.verifier import ForkedRanks
from tests.examples.runs import Run, Trainer


@pytest.mark.slow
def test_run_of_forked_ranks_equals_a_run_of_torchrun(by_torchrun: Run, tp2: Run) -> None:
    forked, started = tp2, by_torchrun
    assert forked.status.status is Status.OK
    assert forked.losses == started.losses
    assert forked.parameters == started.parameters
    assert _sent(forked) == _sent(started)
    assert "torch.distributed.run" in (forked.folder / "command.sh").read_text()
    assert _files(forked) == _files(started)


@pytest.mark.slow
def test_killed_forked_rank_is_named_and_ends_the_other_ranks(
    train: Trainer,
) -> None:
    name = "train-tp2-gpt2-tiny-2cpu"
    with closing(ForkedRanks()) as ranks:
        killer = threading.Thread(target=_kill_second_rank, args=(ranks.warm.pid,))
        killer.start()
        status = train(name, ranks, iterations=500).status
        killer.join()
        assert (status.status, status.rank) == (Status.CRASHED, 1)
        assert "SIGKILL" in status.reason
        assert _ranks(ranks.warm.pid) == {}


def _files(run: Run) -> set[str]:
    return {path.name for path in run.folder.iterdir()}


def _sent(run: Run) -> list[set[tuple[object, ...]]]:
    """Return the calls per rank without the order, which depends on timing."""
    return [
        {
            (calls.group, calls.operation, calls.phase, calls.calls, calls.payload_bytes)
            for calls in rank.calls
        }
        for rank in read_measurements(run.folder, CommunicationRecord).ranks
    ]


def _ranks(pid: int) -> dict[str, psutil.Process]:
    return {
        process.name(): process
        for process in psutil.Process(pid).children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and process.name().startswith("rank")
    }


def _kill_second_rank(pid: int) -> None:
    while "rank1" not in _ranks(pid):
        time.sleep(0.1)
    _ranks(pid)["rank1"].send_signal(signal.SIGKILL)
