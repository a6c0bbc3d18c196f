import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import Status, StatusRecord
from parakit.cluster.checks.host import check_room
from parakit.config.files import ROOT
from parakit.launch.supervise import exit_status
from tests.hang.made import four
from tests.patience import until
from tests.reporting.factory import iteration_line

KILLED = """Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12345)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / records.LOG_FILE).write_text(iteration_line(4) + "\n" + KILLED)
    write_record(tmp_path / records.STATUS_FILE, StatusRecord(Status.INCOMPLETE))
    return tmp_path


def test_a_killed_rank_is_a_crash_unless_the_kernel_has_run_out_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_status, "count_memory_kills", lambda: 5)
    crashed = exit_status.classify_exit(folder, 1, False, kills_before=5)
    assert (crashed.status, crashed.rank) == (Status.CRASHED, 1)
    killed = exit_status.classify_exit(folder, 1, False, kills_before=4)
    assert (killed.status, killed.rank) == (Status.OUT_OF_MEMORY, 1)
    assert killed.reason.startswith("Rank 1 was killed by the kernel")


@pytest.mark.parametrize("limit", [3 << 30, None])
def test_a_limit_on_addresses_is_named_where_memory_was_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(exit_status, "read_address_limit", lambda: limit)
    (folder / "log.txt").write_text("cannot allocate memory for thread-local data: ABORT\n")
    status = exit_status.classify_exit(folder, 1, interrupted=False)
    assert status.status is Status.OUT_OF_MEMORY
    sentence = "A process may have 3.0 GiB of addresses here (ulimit -v)"
    assert (sentence in status.reason) == (limit is not None)


def test_a_gpu_that_is_full_is_not_blamed_on_the_limit_on_addresses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exit_status, "read_address_limit", lambda: 1 << 30)
    (folder / "log.txt").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 1.00 GiB is free.\n"
    )
    status = exit_status.classify_exit(folder, 1, interrupted=False)
    assert status.status is Status.OUT_OF_MEMORY
    assert "ulimit" not in status.reason


def test_torchruns_own_death_is_not_blamed_on_a_rank(folder: Path) -> None:
    status = exit_status.classify_exit(folder, 137, False, kills_before=None)
    assert (status.status, status.rank) == (Status.CRASHED, None)
    assert (
        status.reason == "torchrun was killed by SIGKILL after iteration 4; its ranks were ended."
    )


def test_the_guards_own_death_is_no_request_to_stop(folder: Path) -> None:
    with (folder / records.LOG_FILE).open("a") as log:
        log.write("[exiting program after receiving SIGTERM.] datetime: 2026-01-01 00:00:00 \n")
    status = exit_status.classify_exit(folder, -9, False)
    assert (status.status, status.rank) == (Status.CRASHED, None)
    assert status.reason.startswith("The supervisor of torchrun was killed by SIGKILL after")
    assert exit_status.classify_exit(folder, 1, False).status is not Status.INTERRUPTED


def test_a_full_disk_is_the_first_cause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_status.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert exit_status.classify_exit(folder, 1, False, None).reason.startswith(
        "No space was left on the disk"
    )
    assert exit_status.classify_exit(folder, 1, True, None).status is Status.INTERRUPTED


def test_a_disk_that_was_full_for_a_moment_is_a_cause_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([10**9, 5])
    usage = lambda _: SimpleNamespace(free=next(free, 10**9))  # noqa: E731
    monkeypatch.setattr(exit_status.shutil, "disk_usage", usage)
    monkeypatch.setattr(exit_status, "LOOK_SECONDS", 0.01)
    with exit_status.DiskWatch(folder) as disk:
        until(lambda: disk.exhausted_resource == "space", "the full disk was not seen")
    status = exit_status.classify_exit(folder, 1, False, None, disk.exhausted_resource)
    assert status.reason.startswith("No space was left")
    assert not exit_status.classify_exit(folder, 1, False, None).reason.startswith("No ")


@pytest.fixture
def disk_of_few_files(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB and 20 files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs", str(disk))
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield disk
    finally:
        subprocess.run(("umount", "--lazy", str(disk)), check=True)


def test_inodes_that_are_used_up_are_a_cause_beside_bytes(
    folder: Path, disk_of_few_files: Path
) -> None:
    run = disk_of_few_files
    shutil.copy(folder / records.LOG_FILE, run)
    with exit_status.DiskWatch(run) as disk:
        for number in range(os.statvfs(run).f_favail):
            (run / f"{number}").touch()
        until(lambda: disk.exhausted_resource == "inode", "the end of inodes was not seen")
    assert shutil.disk_usage(run).free > 500_000
    status = exit_status.classify_exit(run, 1, False, None, disk.exhausted_resource)
    assert status.reason.startswith("No inode was left on the disk of disk; ")
    refused = check_room(str(run), 1, "the run", "name another folder with RUNS=").refusal
    assert refused == (
        f"{run} can take 0 more files (free inodes) and the run needs about 64; remove files that "
        "are not needed, or name another folder with RUNS=."
    )


def test_on_a_full_disk_no_rank_is_blamed_for_calls_that_it_could_not_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _one_call_does_not_fit(folder)
    monkeypatch.setattr(exit_status.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    status = exit_status.classify_exit(folder, 1, False)
    assert (status.rank, status.reason[:25]) == (None, "No space was left on the ")


def test_a_failed_run_names_the_rank_whose_call_did_not_fit(folder: Path) -> None:
    stacks = _one_call_does_not_fit(folder)
    status = exit_status.classify_exit(folder, 1, False)
    assert (status.rank, "another size" in status.reason) == (1, True)
    assert stacks.exists()


def _one_call_does_not_fit(folder: Path) -> Path:
    job = four()
    job.call((0,), "1", done=False)
    job.call((1,), "1", size=8, done=False)
    stacks = job.write(folder / records.STACKS_FOLDER, without=(2,))
    message = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    (folder / records.LOG_FILE).write_text(iteration_line(4) + "\n" + message)
    return stacks


def test_a_rank_that_failed_by_itself_is_named_by_the_log(folder: Path) -> None:
    stacks = four().write(folder / records.STACKS_FOLDER)
    assert exit_status.classify_exit(folder, 1, False).rank == 1
    assert not stacks.exists()


def test_the_end_frees_the_reserved_disk_space_and_drops_empty_stacks(folder: Path) -> None:
    exit_status.reserve_room(folder)
    assert (folder / exit_status.RESERVE_FILE).stat().st_blocks * 512 >= exit_status.RESERVE_BYTES
    stacks = folder / records.STACKS_FOLDER
    stacks.mkdir()
    (stacks / "rank0.txt").touch()
    written = exit_status.write_final_status(folder, StatusRecord(Status.OK), 1.26)
    assert written == records.read_status(folder)
    assert written.wall_seconds == 1.3
    assert not stacks.exists()
    assert not (folder / exit_status.RESERVE_FILE).exists()


def test_the_launcher_and_the_supervisor_start_without_torch() -> None:
    modules = "parakit.launch.execute, parakit.launch.supervise.exit_status"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    answer = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "False\n"


def test_an_interrupted_run_with_a_checkpoint_names_the_resume_command(folder: Path) -> None:
    interrupted = StatusRecord(Status.INTERRUPTED, None, "The launcher was asked to stop.")
    assert "make resume" not in exit_status.format_outcome(folder, interrupted)
    for iteration, files in ((20, ("metadata.json", ".metadata")), (40, ("metadata.json",))):
        saved = folder / records.CHECKPOINTS_FOLDER / f"iter_{iteration:07d}"
        saved.mkdir(parents=True)
        for name in files:
            (saved / name).touch()
    lines = exit_status.format_outcome(folder, interrupted).splitlines()
    assert lines[1] == f"'make resume RUN={folder}' continues from the checkpoint of iteration 20."
    assert len(exit_status.format_outcome(folder, StatusRecord(Status.OK)).splitlines()) == 1
