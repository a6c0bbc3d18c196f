import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parakit.artifacts.io import lock_file
from parakit.artifacts.run import is_running
from parakit.cluster.nodes import Nodes
from parakit.config.errors import LaunchError
from parakit.launch.run_folder import LOCK_FILE, hold_run_folder

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
input()
"""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Another process holds this file."""
    command = (sys.executable, "-c", HOLD, str(path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        yield
        holder.kill()


@pytest.mark.parametrize("name", [LOCK_FILE, "log.txt"])
def test_a_run_is_one_launchers_and_not_anybodys_while_a_rank_lives(
    tmp_path: Path, name: str
) -> None:
    with (
        held(tmp_path / name),
        pytest.raises(LaunchError, match="still running"),
        hold_run_folder(tmp_path, None),
    ):
        raise AssertionError("both hold it")
    with hold_run_folder(tmp_path, None):
        assert is_running(tmp_path / LOCK_FILE)
    assert not is_running(tmp_path / LOCK_FILE)


def test_of_several_nodes_the_first_holds_it_and_a_new_folder_is_nobodys(tmp_path: Path) -> None:
    with hold_run_folder(tmp_path, Nodes(2, 0, "a")), hold_run_folder(tmp_path, Nodes(2, 1, "a")):
        assert is_running(tmp_path / LOCK_FILE)
    with hold_run_folder(None, None):
        pass


def test_a_run_folder_that_is_none_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is no folder"), hold_run_folder(tmp_path / "none", None):
        raise AssertionError("a folder that is none is held")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("number", "refuses"), [(errno.ENOSYS, False), (errno.EACCES, True)])
def test_where_a_file_system_has_no_locks_runs_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, refuses: bool
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "log.txt").open("ab") as file:
        if refuses:
            with pytest.raises(PermissionError):
                lock_file(file)
        else:
            lock_file(file)
            assert not is_running(tmp_path / "log.txt")
