"""Rendezvous of launchers over the loopback of this machine, all in a single process."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parakit.artifacts.run import Status, StatusRecord
from parakit.cluster.nodes import Nodes, node_folder
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.launch.rendezvous import messages
from parakit.launch.rendezvous.coordinator import Coordinator
from parakit.launch.rendezvous.messages import NodeRecord
from parakit.launch.rendezvous.worker import Worker
from parakit.launch.supervise.warm import find_free_port
from tests.patience import PATIENCE, until

HAS = {"torch": "2.15.0", "flags": "abc"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send heartbeats ten times as often as in a run, with limits that a slow machine does not exceed.

    torch waits for the resolver, 5 s or more, where a question to it is lost.
    """
    monkeypatch.setattr(messages, "BEAT_SECONDS", 0.02)
    for name in ("ANSWER_SECONDS", "SILENT_SECONDS"):
        monkeypatch.setattr(messages, name, PATIENCE)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def first(port: int) -> Iterator[Coordinator]:
    with coordinator_at(port) as node:
        yield node


def coordinator_at(port: int, count: int = 2, timeout: float = PATIENCE) -> Coordinator:
    return Coordinator(Nodes(count, 0, "127.0.0.1", port), NodeRecord("a", HAS), timeout)


Join = Callable[..., Worker]


@pytest.fixture
def join(port: int) -> Iterator[Join]:
    """Return a function that connects further nodes."""
    with ExitStack() as stack:

        def connect(
            rank: int = 1,
            host: str = "b",
            count: int = 2,
            timeout: float = PATIENCE,
            problem: str | None = None,
            **has: str,
        ) -> Worker:
            nodes = Nodes(count, rank, "127.0.0.1", port)
            worker = Worker(nodes, NodeRecord(host, HAS | has, problem=problem), timeout)
            return stack.enter_context(worker)

        yield connect


def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "log.txt").write_text("first\n")
    (tmp_path / "samples.csv").write_text("seconds,rank\n1,0\n")
    return tmp_path


def started(first: Coordinator, join: Join, tmp_path: Path) -> Worker:
    """Return two nodes that have started."""
    other = join()
    first.gather()
    joining = in_thread(other.join)
    first.announce(run_folder(tmp_path))
    ((folder, _),) = joining()
    assert folder == tmp_path
    return other


def leave(worker: Worker) -> None:
    """End the node like a launcher that ends before its part of the run is over."""
    worker.stop()


def join_and_leave(worker: Worker) -> object:
    """Join and end the node like a launcher that ends with the error of `join`."""
    try:
        return worker.join()
    finally:
        leave(worker)


def in_thread(work: Callable[[], object]) -> Callable[[], list[Any]]:
    """Start work in a thread. The returned function waits for it and gives its result or error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except LaunchError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> list[Any]:
        thread.join(PATIENCE)
        return results

    return wait


def eventually(ask: Callable[[], str | None]) -> str | None:
    return until(ask, "no answer")


def wait_for_beats(first: Coordinator, count: int) -> None:
    """Wait until so many further heartbeats of node 1 have arrived."""
    for _ in range(count):
        last = first._records[1].beat
        until(lambda last=last: first._records[1].beat != last, "no heartbeat")


def test_joining_nodes_start_in_the_folder_of_node_0(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    other = join()
    nodes = first.gather()
    assert (nodes.hosts, nodes.interface) == (("a", "b"), "lo")
    joining = in_thread(other.join)
    first.announce(run_folder(tmp_path))
    ((folder, seen),) = joining()
    assert (folder, seen.interface, seen.rank) == (tmp_path, "lo", 1)
    assert first.find_failure() is None
    assert other.find_failure() is None
    other.finish(0)
    assert first.finish(0) == 0


def test_torchrun_gets_the_same_free_port_on_all_nodes(
    first: Coordinator, join: Join, port: int, tmp_path: Path
) -> None:
    other = join()
    nodes = first.gather()
    joining = in_thread(other.join)
    first.announce(run_folder(tmp_path))
    ((_, seen),) = joining()
    assert seen.port == nodes.port != port
    with socket.create_server(("", seen.port)):
        pass


def test_log_lines_of_other_nodes_are_appended_to_node_0s_log(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    other = started(first, join, tmp_path)
    mine = node_folder(tmp_path, 1)
    mine.mkdir(parents=True)
    (mine / "log.txt").write_text("iteration 1\niterat")
    assert first.find_failure() is None
    assert (tmp_path / "log.txt").read_text() == "first\niteration 1\n"
    (mine / "log.txt").write_text("iteration 1\niteration 2")
    (mine / "samples.csv").write_text("seconds,rank\n1,1\n")
    other.finish(0)
    first.finish(0)
    assert (tmp_path / "log.txt").read_text() == "first\niteration 1\niteration 2\n"
    assert (tmp_path / "samples.csv").read_text() == "seconds,rank\n1,0\n1,1\n"


def test_log_of_an_earlier_attempt_is_not_appended_again(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    log = node_folder(tmp_path, 1) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("of the attempt before\n")
    started(first, join, tmp_path)
    log.write_text("of the attempt before\nof this one\n")
    first.find_failure()
    assert (tmp_path / "log.txt").read_text() == "first\nof this one\n"


def test_a_node_that_fails_ends_the_run_with_its_exit_code(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    other = started(first, join, tmp_path)
    other.finish(7)
    leave(other)
    assert eventually(first.find_failure) == "Node 1 (b) ended with 7."
    assert first.finish(0) == 7
    assert first.cause is None  # The log contains the reason.


GONE = "Node 1 (b): its launcher is gone."
LOST = "Node 1 (b): it was lost: its launcher gives no sign."


def test_launcher_that_ends_early_reports_it_because_no_log_does(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    leave(started(first, join, tmp_path))
    assert eventually(first.find_failure) == GONE
    assert first.cause == StatusRecord(Status.CRASHED, None, GONE)
    assert first.finish(0) == 1


def test_node_is_lost_only_after_the_allowed_number_of_missing_heartbeats(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "BEAT_SECONDS", 1.0)
    monkeypatch.setattr(messages, "SILENT_SECONDS", 3.0)
    first = coordinator_at(
        port
    )  # The watching thread is not started, because this test calls the check itself.

    def look(beat: int) -> str | None:
        first._read_records([messages.encode(NodeRecord("b", HAS, beat=beat)).encode()])
        return first.find_failure()

    assert [look(beat) for beat in range(9)] == [None] * 9
    assert [look(8) for _ in range(4)] == [None, None, None, LOST]


def test_killed_launcher_is_lost_by_missing_heartbeats(
    first: Coordinator, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import time; from parakit.cluster.nodes import Nodes\n"
        "from parakit.launch.rendezvous.messages import NodeRecord\n"
        "from parakit.launch.rendezvous.worker import Worker\n"
        f"with Worker(Nodes(2, 1, '127.0.0.1', {port}), NodeRecord('b', {HAS})) as worker:\n"
        "    worker.join(); time.sleep(3600)"
    )
    process = subprocess.Popen((sys.executable, "-c", code), cwd=ROOT)
    try:
        first.gather()
        first.announce(run_folder(tmp_path))
        wait_for_beats(first, 3)
        assert first.find_failure() is None
        process.send_signal(signal.SIGKILL)
        monkeypatch.setattr(messages, "SILENT_SECONDS", 1.0)
        assert eventually(first.find_failure) == LOST
        assert first.cause == StatusRecord(Status.CRASHED, None, LOST)
    finally:
        process.kill()
        process.wait()


def test_silent_node_is_lost_although_its_connection_stays_open(
    first: Coordinator, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = started(first, join, tmp_path)
    monkeypatch.setattr(other, "_send_heartbeat", lambda store: None)
    monkeypatch.setattr(messages, "SILENT_SECONDS", 1.0)
    assert eventually(first.find_failure) == LOST


def test_translated_addresses_select_no_interface(
    first: Coordinator, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = join()
    monkeypatch.setattr(other, "_record", replace(other._record, reaches="192.0.2.1"))
    until(lambda: first._records and first._records[1].reaches == "192.0.2.1", "not reported")
    assert first.gather().interface is None


def test_failing_launcher_reports_the_reason_because_no_log_does(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    started(first, join, tmp_path).finish(1, OSError(28, "No space left on device"))
    assert eventually(first.find_failure) == "Node 1 (b): [Errno 28] No space left on device"
    assert first.cause is not None
    assert first.cause.status is Status.CRASHED


def test_a_node_that_was_asked_to_stop_interrupts_the_run(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    started(first, join, tmp_path).finish(1, KeyboardInterrupt())
    assert eventually(first.find_failure) == "Node 1 (b): its launcher was asked to stop."
    assert first.cause is not None
    assert first.cause.status is Status.INTERRUPTED


def test_a_torchrun_that_was_killed_on_another_node_is_the_cause(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    other = started(first, join, tmp_path)
    log = node_folder(tmp_path, 1) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError: connection closed by peer\n")
    other.finish(137)
    reason = eventually(first.find_failure)
    assert reason == "Node 1 (b): torchrun was killed by SIGKILL; its ranks were ended."
    assert first.finish(1) == 1


def test_a_node_that_node_0_ended_is_not_the_cause(
    first: Coordinator, join: Join, tmp_path: Path
) -> None:
    other = started(first, join, tmp_path)
    finishing = in_thread(lambda: first.finish(3))
    assert eventually(other.find_failure) == "Node 0 has ended the run."
    other.finish(137)
    assert finishing() == [3]
    assert first.cause is None


def test_other_nodes_stop_if_node_0_vanishes(
    join: Join, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator_at(port) as first:
        other = started(first, join, tmp_path)
    # The connection ends, so nobody waits until an answer is overdue.
    monkeypatch.setattr(messages, "ANSWER_SECONDS", 10 * PATIENCE)
    assert eventually(other.find_failure) == "Node 0 was lost."


def test_other_nodes_stop_if_the_machine_of_node_0_no_longer_answers(
    first: Coordinator, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel closes no connection in this case, and torch would wait forever.
    other = started(first, join, tmp_path)
    assert other.find_failure() is None
    never = threading.Event()
    monkeypatch.setattr(other, "_send_heartbeat", lambda store: never.wait())
    monkeypatch.setattr(messages, "ANSWER_SECONDS", 1.0)
    assert eventually(other.find_failure) == "Node 0 was lost."
    never.set()


@pytest.mark.slow
def test_slow_store_loses_no_node(
    first: Coordinator, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = started(first, join, tmp_path)

    def slowly(work: Callable[[Any], None]) -> Callable[[Any], None]:
        def after_a_second(argument: object) -> None:
            time.sleep(1)
            work(argument)

        return after_a_second

    monkeypatch.setattr(other, "_send_heartbeat", slowly(other._send_heartbeat))
    monkeypatch.setattr(first, "_read_records", slowly(first._read_records))
    wait_for_beats(first, 1)
    monkeypatch.setattr(
        messages, "SILENT_SECONDS", 0.5
    )  # The limit is shorter than a single answer of the store.
    wait_for_beats(first, 2)
    assert first.find_failure() is None
    assert other.find_failure() is None


def test_the_node_that_differs_is_named_with_both_values(first: Coordinator, join: Join) -> None:
    other = join(torch="2.14.0")
    joining = in_thread(lambda: join_and_leave(other))
    message = (
        r"Node 1 \(b\) has torch 2.14.0, and node 0 \(a\) 2.15.0; all nodes must have the same"
    )
    with pytest.raises(LaunchError, match=message):
        first.gather()
    assert "torch 2.14.0" in str(joining()[0])


def test_cause_of_a_stopped_node_is_reported_on_node_0(first: Coordinator, join: Join) -> None:
    other = join(problem="Needs 2 GPUs, found 0.")
    with pytest.raises(LaunchError, match=r"^Needs 2 GPUs, found"):
        join_and_leave(other)
    with pytest.raises(LaunchError, match=r"Node 1 \(b\): Needs 2 GPUs, found 0"):
        first.gather()


def test_a_node_that_is_lost_before_the_start_is_named(first: Coordinator, join: Join) -> None:
    other = join()
    assert eventually(lambda: "came" if first._records else None)
    leave(other)
    assert eventually(lambda: "gone" if first._records[1].exit_code else None)
    with pytest.raises(LaunchError, match=r"Node 1 \(b\) was lost before the run began"):
        first.gather()


def test_a_folder_that_is_not_shared_is_refused_on_both_sides(
    first: Coordinator, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until = messages.wait_until

    def wait(holds: Callable[[], bool], seconds: float) -> bool:
        waits_for_nodes = threading.current_thread() is threading.main_thread()
        return wait_until(holds, seconds if waits_for_nodes else 0.2)

    # The other machine has a file of that name, but not node 0's. Only the node that looks for the file gives up soon.
    monkeypatch.setattr(messages, "wait_until", wait)
    other = join()
    first.gather()
    folder = run_folder(tmp_path)

    def join_elsewhere() -> object:
        eventually(lambda: "named" if other._state and other._state.folder else None)
        (folder / "run.json").write_text("of another machine")
        return join_and_leave(other)

    joining = in_thread(join_elsewhere)
    with pytest.raises(LaunchError, match=r"Node 1 \(b\) cannot start: it does not see .*RUNS="):
        first.announce(folder)
    assert "does not see" in str(joining()[0])


def test_missing_node_is_named_with_the_command_to_start_it(port: int) -> None:
    with coordinator_at(port, count=3, timeout=0.2) as lonely:
        message = r"Node 1, 2 of 3 did not come to 127\.0\.0\.1, port \d+, within 0 s"
        with pytest.raises(LaunchError, match=message):
            lonely.gather()


def test_the_same_node_rank_twice_is_refused(first: Coordinator, join: Join) -> None:
    usurper, _ = join(rank=0, host="b"), join(rank=1, host="c")
    with pytest.raises(LaunchError, match="NODE_RANK=0 is taken by host a; give each host its own"):
        usurper.join()
    assert first.gather().hosts == ("a", "c")


def test_second_node_0_exits_in_favour_of_the_one_at_the_address(
    first: Coordinator, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = messages.find_node_0
    monkeypatch.setattr(
        messages, "is_local_address", lambda _: False
    )  # The address looks like one of another host.
    monkeypatch.setattr(messages, "find_node_0", lambda address, _: look(address, port))
    with coordinator_at(find_free_port()) as second:
        with pytest.raises(LaunchError, match="NODE_RANK=0 is taken by host a at MASTER_ADDR=127"):
            second.gather()
        assert look("127.0.0.1", port) == first._node_0_record


def test_node_0_may_be_reached_by_an_address_that_is_not_local(
    port: int, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "is_local_address", lambda _: False)
    with coordinator_at(port) as alone:
        join()
        assert alone.gather().hosts == ("a", "b")


def test_a_node_rank_beyond_node_0s_count_is_refused(first: Coordinator, join: Join) -> None:
    third = join(rank=2, count=3)
    with pytest.raises(LaunchError, match="NODE_RANK=2 is not below NNODES=2"):
        third.join()


def test_occupied_port_and_absent_node_0_are_reported_with_what_to_change(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(LaunchError, match=f"MASTER_PORT={port}"):
        coordinator_at(port)
    with pytest.raises(LaunchError, match="Node 0 was not reached at MASTER_ADDR=127"):
        Worker(Nodes(2, 1, "127.0.0.1", port), NodeRecord("b", HAS), timeout=0.1)


def test_a_second_run_on_the_same_port_is_refused_while_nodes_are_awaited(
    first: Coordinator, port: int
) -> None:
    with pytest.raises(LaunchError, match=f"MASTER_PORT={port} cannot be listened on"):
        coordinator_at(port)


def test_other_program_at_the_address_of_node_0_is_reported(
    port: int, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "ANSWER_SECONDS", 0.5)  # torch retries for this time.
    with socket.create_server(
        ("127.0.0.1", port)
    ):  # The listener accepts connections and sends nothing.
        other = join(timeout=0.5)
        with pytest.raises(LaunchError, match=rf"port {port}, gives no answer: something else may"):
            other.join()
        leave(other)


@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.binary(min_size=1, max_size=4096), min_size=1, max_size=6))
def test_foreign_connections_do_not_disturb_the_rendezvous(strangers: list[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    magic = b"\0" + (0x3C85F7CE).to_bytes(
        4, "little"
    )  # A client of the store starts with these bytes.
    with coordinator_at(port) as first, ExitStack() as stack:
        for number, data in enumerate(strangers):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(magic * (number % 3 == 0) + data)
        worker = Worker(Nodes(2, 1, "127.0.0.1", port), NodeRecord("b", HAS), PATIENCE)
        with worker:
            assert first.gather().hosts == ("a", "b")


def test_invalid_record_in_the_store_counts_as_no_node(
    first: Coordinator, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    look = first._read_records
    monkeypatch.setattr(first, "_read_records", lambda values: (seen.extend(values), look(values)))
    written = '{"host": 7}'
    first._store.set(messages.node_key(1), written)
    until(lambda: seen.count(written.encode()) > 1, "node 0 did not look")
    assert not first._records
    first._store.set(messages.node_key(1), "")
    join()
    assert first.gather().hosts == ("a", "b")


def test_log_level_of_torch_is_restored() -> None:
    messages.load_torch()
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ
