"""A node with nothing to log does not hang, and a hanging run is stopped with the stacks of all nodes.

Two launchers of this machine run the parts of two nodes, each in a separate thread, with a script for torchrun.
"""

import io
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from rich.console import Console

from parakit.cluster.nodes import NodeGroup, Nodes, node_folder
from parakit.config.run import DeviceKind
from parakit.launch.compose import Launch
from parakit.launch.execute import run_ranks
from parakit.launch.options import Options
from parakit.launch.progress import RunProgress
from parakit.launch.rendezvous import coordinator, messages
from parakit.launch.rendezvous.coordinator import Coordinator
from parakit.launch.rendezvous.messages import NodeRecord
from parakit.launch.rendezvous.worker import Worker
from parakit.launch.supervise import hang
from parakit.launch.supervise.hang import EndedRunError
from tests.patience import PATIENCE

pytestmark = pytest.mark.ranks

LINES, TIMEOUT = 40, 20
"""Number of lines that a node logs, and number of these lines after which the other node's silence would be a hang."""
SPEAKING = (
    *("bash", "-c"),
    f"for i in {{1..{LINES}}}; do echo line; sleep 0.1; done; touch ${{KIT_STACKS%/*}}/said",
)
SILENT = ("bash", "-c", "until [ -e ${KIT_STACKS%/*}/said ]; do sleep 0.1; done")
RANK = """
import os, signal, sys, time
from megatron_patches.stacks import dump_stacks_on_request
dump_stacks_on_request()
def stuck_here():
    print("ready", flush=True)
    if "stopped" in sys.argv:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
stuck_here()
"""

Shares = Callable[[Sequence[str], Sequence[str], float], list[object]]


@pytest.fixture
def shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shares]:
    """Return a function that runs the commands of both nodes and gives the exit code or error of each."""
    for module, name in (
        *((messages, "ANSWER_SECONDS"), (messages, "SILENT_SECONDS")),
        *((coordinator, "END_SECONDS"), (coordinator, "STACK_SECONDS"), (hang, "STACK_SECONDS")),
    ):
        monkeypatch.setattr(module, name, PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    nodes = Nodes(2, 0, "127.0.0.1", port)
    with ExitStack() as stack:
        first = stack.enter_context(Coordinator(nodes, NodeRecord("a", {}), PATIENCE))
        other = stack.enter_context(Worker(replace(nodes, rank=1), NodeRecord("b", {}), PATIENCE))

        def run(
            first_command: Sequence[str], other_command: Sequence[str], hang_timeout: float
        ) -> list[object]:
            results: list[object] = [None, None]
            (tmp_path / "run.json").write_text("{}")

            def second() -> None:
                folder = node_folder(other.join()[0], 1)
                folder.mkdir(parents=True)
                log = folder / "log.txt"
                results[1] = share(other_command, hang_timeout, log, other, tmp_path)

            first.gather()
            thread = threading.Thread(target=second, daemon=True)
            thread.start()
            first.announce(tmp_path)
            results[0] = share(first_command, hang_timeout, tmp_path / "log.txt", first, tmp_path)
            thread.join(PATIENCE)
            return results

        yield run


def share(
    command: Sequence[str], hang_timeout: float, log: Path, group: NodeGroup, folder: Path
) -> object:
    launch = SimpleNamespace(
        command=lambda _: command,
        environment={},
        runtime=SimpleNamespace(container=None),
        job=SimpleNamespace(options=Options(hang_timeout_seconds=hang_timeout)),
        time_limit_seconds=None,
        warm=None,
        spec=SimpleNamespace(device=DeviceKind.CPU),
    )
    progress = RunProgress(Console(file=io.StringIO()), "share", 1)
    try:
        return run_ranks(cast(Launch, launch), log, progress, group, folder)
    except EndedRunError as error:
        return error


def clock(now: Callable[[], float]) -> SimpleNamespace:
    """Return a simulated clock for the watch on logs, because this machine may be slow to start ranks."""
    return SimpleNamespace(monotonic=now, sleep=time.sleep, time_ns=time.time_ns)


@pytest.mark.parametrize(
    "commands", [(SPEAKING, SILENT), pytest.param((SILENT, SPEAKING), marks=pytest.mark.slow)]
)
def test_node_with_a_silent_log_is_not_stopped_while_another_log_grows(
    shares: Shares,
    commands: tuple[Sequence[str], Sequence[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speaking = (tmp_path, node_folder(tmp_path, 1))[commands.index(SPEAKING)] / "log.txt"

    def said() -> float:
        return float(speaking.read_text().count("line")) if speaking.exists() else 0.0

    monkeypatch.setattr(hang, "time", clock(said))
    assert shares(*commands, TIMEOUT) == [0, 0]
    assert said() == LINES


def rank(number: int, *arguments: str) -> Sequence[str]:
    return ("env", f"RANK={number}", sys.executable, "-c", RANK, *arguments)


def test_hang_stops_the_run_with_stacks_of_all_nodes_and_names_the_stopped_rank(
    shares: Shares, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> float:
        """The clock starts once both ranks wait and one of them is stopped."""
        ready = (tmp_path / "log.txt").read_text().count("ready") == 2
        family = psutil.Process().children(recursive=True) if ready else []
        stopped = any(hang._is_stopped(process) for process in family)
        return time.monotonic() if stopped else -math.inf

    monkeypatch.setattr(hang, "time", clock(now))
    (error, other_error) = shares(rank(0), rank(1, "stopped"), 3)
    assert isinstance(error, EndedRunError)
    assert isinstance(other_error, EndedRunError)
    assert error.rank == 1
    assert "was stopped by a signal" in str(error)
    for number in (0, 1):
        assert "stuck_here" in (tmp_path / "stacks" / f"rank{number}.txt").read_text()
