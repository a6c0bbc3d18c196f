"""Launchers that meet over this machine's loopback, each in a thread of its own."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.launch.cluster.joining import OtherNode
from tools.launch.cluster.lines import LineError, Lines
from tools.launch.cluster.meeting import FirstNode, Present
from tools.launch.cluster.node_files import node_folder
from tools.launch.cluster.nodes import Nodes
from tools.launch.errors import LaunchError
from tools.records.run import Status, StatusRecord

HAS = {"torch": "2.15.0", "flags": "abc"}


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def first(port: int) -> Iterator[FirstNode]:
    node = FirstNode(Nodes(2, 0, "127.0.0.1", port), patience=5)
    yield node
    node.close()


Join = Callable[..., OtherNode]


@pytest.fixture
def join(port: int) -> Iterator[Join]:
    """Connects further nodes."""
    made: list[OtherNode] = []

    def connect(rank: int = 1) -> OtherNode:
        made.append(OtherNode(Nodes(2, rank, "127.0.0.1", port), patience=5))
        return made[-1]

    yield connect
    for node in made:
        node.close()


def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "log.txt").write_text("first\n")
    (tmp_path / "samples.csv").write_text("seconds,rank\n1,0\n")
    return tmp_path


def met(first: FirstNode, join: Join, tmp_path: Path) -> OtherNode:
    """Both past the start."""
    other = join()
    other.introduce(Present(1, "b", HAS))
    present = first.gather(Present(0, "a", HAS))
    assert [each.host for each in present] == ["a", "b"]
    joining = in_thread(other.join)
    first.announce(run_folder(tmp_path))
    joining()
    return other


def in_thread(work: Callable[[], object]) -> Callable[[], list[object]]:
    """Start it; the answer waits for it and gives what it returned or raised."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except LaunchError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> list[object]:
        thread.join(20)
        return results

    return wait


def test_nodes_that_have_the_same_start_in_the_folder_that_node_0_made(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    other = met(first, join, tmp_path)
    assert first.interface() == other.interface() == "lo"
    assert first.failure() is None
    assert other.failure() is None
    other.finish(0)
    assert first.finish(0) == 0


def test_what_the_others_log_comes_into_node_0s_log_whole(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    other = met(first, join, tmp_path)
    mine = node_folder(tmp_path, 1)
    mine.mkdir(parents=True)
    (mine / "log.txt").write_text("iteration 1\niterat")
    assert first.failure() is None
    assert (tmp_path / "log.txt").read_text() == "first\niteration 1\n"
    (mine / "log.txt").write_text("iteration 1\niteration 2")
    (mine / "samples.csv").write_text("seconds,rank\n1,1\n")
    other.finish(0)
    first.finish(0)
    assert (tmp_path / "log.txt").read_text() == "first\niteration 1\niteration 2\n"
    assert (tmp_path / "samples.csv").read_text() == "seconds,rank\n1,0\n1,1\n"


def test_what_another_node_logged_in_an_attempt_before_is_not_added_again(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    log = node_folder(tmp_path, 1) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("of the attempt before\n")
    met(first, join, tmp_path)
    log.write_text("of the attempt before\nof this one\n")
    first.failure()
    assert (tmp_path / "log.txt").read_text() == "first\nof this one\n"


def test_a_node_that_fails_ends_the_run_with_its_exit_code(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    other = met(first, join, tmp_path)
    other.finish(7)
    assert eventually(first.failure) == "Node 1 (b) ended with 7."
    assert first.finish(0) == 7
    assert first.cause is None  # the log says why


def test_a_node_that_vanishes_is_named_because_no_log_tells(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    met(first, join, tmp_path).close()
    assert eventually(first.failure) == "Node 1 (b) was lost: its launcher is gone."
    lost = "Node 1 (b) was lost: its launcher is gone."
    assert first.cause == StatusRecord(Status.CRASHED, None, lost)
    assert first.finish(0) == 1


def test_a_launcher_that_fails_says_why_because_no_log_tells(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    met(first, join, tmp_path).finish(1, OSError(28, "No space left on device"))
    assert eventually(first.failure) == "Node 1 (b): [Errno 28] No space left on device"
    assert first.cause is not None
    assert first.cause.status is Status.CRASHED


def test_a_node_that_was_told_to_stop_interrupts_the_run(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    met(first, join, tmp_path).finish(1, KeyboardInterrupt())
    assert eventually(first.failure) == "Node 1 (b): its launcher was told to stop."
    assert first.cause is not None
    assert first.cause.status is Status.INTERRUPTED


def test_a_torchrun_that_was_killed_on_another_node_is_the_cause(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    other = met(first, join, tmp_path)
    log = node_folder(tmp_path, 1) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError: connection closed by peer\n")
    other.finish(137)
    reason = eventually(first.failure)
    assert reason == "Node 1 (b): torchrun was killed by SIGKILL; its ranks were ended."
    assert first.finish(1) == 1


def test_a_node_that_node_0_ended_is_not_the_cause(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    other = met(first, join, tmp_path)
    finishing = in_thread(lambda: first.finish(3))
    assert eventually(other.failure) == "Node 0 has ended the run."
    other.finish(137)
    assert finishing() == [3]
    assert first.cause is None


def test_the_others_stop_when_node_0_fails_or_vanishes(
    first: FirstNode, join: Join, tmp_path: Path
) -> None:
    other = met(first, join, tmp_path)
    first.close()
    assert eventually(other.failure) == "Node 0 was lost."


def test_the_node_that_differs_is_named_with_both_values(first: FirstNode, join: Join) -> None:
    other = join()
    other.introduce(Present(1, "b", HAS | {"torch": "2.14.0"}))
    joining = in_thread(other.join)
    message = (
        r"Node 1 \(b\) has torch 2.14.0, and node 0 \(a\) 2.15.0; all nodes must have the same"
    )
    with pytest.raises(LaunchError, match=message):
        first.gather(Present(0, "a", HAS))
    assert "torch 2.14.0" in str(joining()[0])


def test_what_stops_one_node_is_told_on_node_0(first: FirstNode, join: Join) -> None:
    join().introduce(Present(1, "b", HAS), problem="2 GPU(s) are wanted and 0 found.")
    with pytest.raises(LaunchError, match=r"Node 1 \(b\): 2 GPU\(s\) are wanted and 0 found"):
        first.gather(Present(0, "a", HAS))


def test_a_folder_that_is_not_shared_is_refused(
    first: FirstNode, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.launch.cluster.meeting.ANSWER_SECONDS", 0.2)
    other = join()
    other.introduce(Present(1, "b", HAS))
    first.gather(Present(0, "a", HAS))
    folder = run_folder(tmp_path)
    answers: list[object] = []

    def elsewhere() -> None:
        # The other machine has a folder of that name, but not node 0's.
        told = other._expect("run")
        answers.append(told)
        other._lines.send(problem=f"it does not see {told['run']}; RUNS= must name a shared folder")

    thread = threading.Thread(target=elsewhere, daemon=True)
    thread.start()
    with pytest.raises(LaunchError, match=r"Node 1 \(b\) cannot start: it does not see .*RUNS="):
        first.announce(folder)
    thread.join(5)
    assert answers


def test_a_node_looks_for_the_very_file_that_node_0_wrote(
    port: int, join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.launch.cluster.joining.ANSWER_SECONDS", 0.2)
    folder = run_folder(tmp_path)
    with socket.create_server(("127.0.0.1", port)) as server:
        joining = in_thread(join().join)
        lines = Lines(server.accept()[0])
        lines.send(run=str(folder), sha256="of another file")
        answer = lines.receive(5)
        lines.close()
    assert answer is not None
    assert "does not see" in answer["problem"]
    assert "gone" in str(joining()[0])


def test_a_node_that_does_not_come_is_named_with_what_to_start(port: int) -> None:
    lonely = FirstNode(Nodes(3, 0, "10.0.0.1", port), patience=0.2)
    with pytest.raises(LaunchError, match=r"Node 1, 2 of 3 did not come to 10\.0\.0\.1, port \d+"):
        lonely.gather(Present(0, "a", HAS))
    lonely.close()


def test_the_same_node_rank_twice_is_refused(first: FirstNode, join: Join) -> None:
    usurper = join(rank=0)
    usurper.introduce(Present(0, "b", HAS))
    right = join()
    right.introduce(Present(1, "c", HAS))
    refused = in_thread(usurper.join)
    assert [each.host for each in first.gather(Present(0, "a", HAS))] == ["a", "c"]
    assert "NODE_RANK=0 is taken by host a" in str(refused()[0])


def test_a_taken_port_and_an_absent_node_0_say_what_to_change(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(LaunchError, match=f"MASTER_PORT={port}"):
        FirstNode(Nodes(2, 0, "127.0.0.1", port))
    with pytest.raises(LaunchError, match="Node 0 was not reached at MASTER_ADDR=127"):
        OtherNode(Nodes(2, 1, "127.0.0.1", port), patience=0.1)


@given(st.binary(min_size=1).filter(lambda data: not data.startswith(b"{")))
def test_a_stranger_who_speaks_something_else_is_an_error_not_a_crash(data: bytes) -> None:
    one, two = socket.socketpair()
    with one, two:
        lines = Lines.__new__(Lines)  # A pair of Unix sockets has no TCP to tune.
        lines.socket, lines._received, lines._ended = two, b"", False
        one.sendall(data.replace(b"\n", b" ") + b"\n")
        with pytest.raises(LineError):
            lines.receive(1)


def eventually(ask: Callable[[], str | None]) -> str | None:
    for _ in range(100):
        if (answer := ask()) is not None:
            return answer
        threading.Event().wait(0.02)
    return None
