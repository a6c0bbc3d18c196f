"""A node that has nothing to log is no hang; a run that hangs is ended with the stacks of all nodes.

Two launchers of this machine run their shares, each in a thread of its own, with a script for torchrun.
"""

import io
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from tools.launch.cluster.nodes import NodeGroup, Nodes, node_folder
from tools.launch.cluster.rendezvous.coordinator import Coordinator
from tools.launch.cluster.rendezvous.messages import NodeRecord
from tools.launch.cluster.rendezvous.worker import Worker
from tools.launch.compose import Launch
from tools.launch.execute import run_ranks
from tools.launch.progress import RunProgress
from tools.launch.supervise.hang import HangError
from tools.spec.run import DeviceKind

SILENT = ("sleep", "2.5")
SPEAKING = ("bash", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.25; done")
RANK = """
import os, signal, sys, time
from megatron_patches.stacks import dump_stacks_on_request
dump_stacks_on_request()
def stuck_here():
    print("ready", flush=True)
    if "stopped" in sys.argv:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
stuck_here()
"""

Shares = Callable[[Sequence[str], Sequence[str], float], list[object]]


@pytest.fixture
def shares(tmp_path: Path) -> Iterator[Shares]:
    """Runs both nodes' commands; the exit code of each, or its error."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    nodes = Nodes(2, 0, "127.0.0.1", port)
    with ExitStack() as stack:
        first = stack.enter_context(Coordinator(nodes, NodeRecord("a", {}), timeout=60))
        other = stack.enter_context(Worker(replace(nodes, rank=1), NodeRecord("b", {}), timeout=60))

        def run(mine: Sequence[str], theirs: Sequence[str], hang_timeout: float) -> list[object]:
            results: list[object] = [None, None]
            (tmp_path / "run.json").write_text("{}")

            def second() -> None:
                folder = node_folder(other.join()[0], 1)
                folder.mkdir(parents=True)
                log = folder / "log.txt"
                results[1] = share(theirs, hang_timeout, log, other, tmp_path)

            first.gather()
            thread = threading.Thread(target=second, daemon=True)
            thread.start()
            first.announce(tmp_path)
            results[0] = share(mine, hang_timeout, tmp_path / "log.txt", first, tmp_path)
            thread.join(20)
            return results

        yield run


def share(
    command: Sequence[str], hang_timeout: float, log: Path, group: NodeGroup, folder: Path
) -> object:
    launch = SimpleNamespace(
        command=lambda _: command,
        environment={},
        runtime=SimpleNamespace(container=False),
        hang_timeout_seconds=hang_timeout,
        time_limit_seconds=None,
        warm=None,
        spec=SimpleNamespace(device=DeviceKind.CPU),
    )
    progress = RunProgress(Console(file=io.StringIO()), "share", 1)
    try:
        return run_ranks(cast(Launch, launch), log, progress, None, group, folder)
    except HangError as error:
        return error


@pytest.mark.parametrize("commands", [(SPEAKING, SILENT), (SILENT, SPEAKING)])
def test_a_node_whose_log_never_grows_is_not_ended_while_anothers_grows(
    shares: Shares, commands: tuple[Sequence[str], Sequence[str]]
) -> None:
    assert shares(*commands, 1.5) == [0, 0]


def rank(number: int, *words: str) -> Sequence[str]:
    return ("env", f"RANK={number}", sys.executable, "-c", RANK, *words)


def test_a_hang_is_ended_with_the_stacks_of_all_nodes_and_names_the_rank_that_was_stopped(
    shares: Shares, tmp_path: Path
) -> None:
    (error, others) = shares(rank(0), rank(1, "stopped"), 3)
    assert isinstance(error, HangError)
    assert isinstance(others, HangError)
    assert error.rank == 1
    assert "rank 1 was stopped by a signal" in str(error)
    for number in (0, 1):
        assert "stuck_here" in (tmp_path / "stacks" / f"rank{number}.txt").read_text()
