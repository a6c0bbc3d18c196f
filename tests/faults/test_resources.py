"""Runs without disk space, memory, data or ports, and runs with NaN."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.run import CHECKPOINTS_FOLDER, Status
from parakit.launch.supervise.exit_status import count_memory_kills
from tests.faults.runs import SAVE_EVERY, Kit, same_losses

pytestmark = pytest.mark.slow
OVERRIDE = "--override-opt_param-scheduler"
"""Flag in Megatron's spelling, by which values of the command replace those of the checkpoint."""
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_disk(kit: Kit, tmp_path: Path, starting_weights: Path) -> Iterator[Kit]:
    """Return the kit with its runs on a disk of 400 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(disk))
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no tmpfs")
    there = Kit(disk, Path(kit.environment["DATA"]), starting_weights)
    there.environment["KEEP"] = "1"
    try:
        yield there
    finally:
        subprocess.run(("umount", "--lazy", str(disk)), check=True)


def fill(disk: Path, but_for_bytes: int) -> Path:
    """Fill the disk except for some bytes."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        while (room := shutil.disk_usage(disk).free - but_for_bytes) > 0:
            with suppress(OSError):  # The run writes at the same time.
                size = file.seek(0, os.SEEK_END)
                os.posix_fallocate(file.fileno(), size, room)
    return filler


@pytest.mark.parametrize(("while_doing", "left_bytes"), [("saving", 1 << 20), ("logging", 0)])
def test_full_disk_ends_the_run_which_resumes_once_there_is_space(
    kit: Kit, small_disk: Kit, while_doing: str, left_bytes: int
) -> None:
    victim = small_disk.start("dp2")
    victim.wait_for("iteration        5/")
    filler = fill(small_disk.runs, left_bytes)
    ended = victim.end()
    status = ended.status
    assert status.status is Status.CRASHED, status
    assert "o space" in status.reason
    assert ended.run.log.iterations
    filler.unlink()
    resumed = small_disk.resume(ended.folder)
    assert resumed.exit_code == 0, resumed.output
    same_losses(resumed.run, kit.whole_curve("dp2"))


def test_removed_data_do_not_disturb_a_run_and_its_resume_names_the_missing_file(
    kit: Kit, tmp_path: Path
) -> None:
    data = copied_data(kit, tmp_path)
    victim = kit.start("dp2", DATA=str(data))
    victim.wait_for("iteration        6/")
    data.with_suffix(".bin").unlink()
    ended = victim.end()
    assert (
        ended.status.status is Status.OK
    )  # The kernel keeps mapped data after the file is removed.
    refused = kit.resume(ended.folder, ITERS="20")
    assert refused.exit_code == 2
    assert data.name in refused.output


def test_truncated_data_kill_a_rank_and_the_reason_names_them(kit: Kit, tmp_path: Path) -> None:
    data = copied_data(kit, tmp_path)
    victim = kit.start("dp2", DATA=str(data))
    victim.wait_for("iteration        6/")
    os.truncate(data.with_suffix(".bin"), 0)
    ended = victim.end()
    assert ended.status.status is Status.CRASHED
    assert "SIGBUS" in ended.status.reason
    shutil.copy(Path(kit.environment["DATA"]).with_suffix(".bin"), data.with_suffix(".bin"))
    resumed = kit.resume(ended.folder)
    assert resumed.exit_code == 0, resumed.output
    same_losses(resumed.run, kit.whole_curve("dp2"))


def test_rank_at_its_memory_limit_is_named(kit: Kit) -> None:
    victim = kit.start("dp2", MICRO_BATCH="4", GLOBAL_BATCH="8")
    # The first iteration allocates memory that later iterations reuse (`GLIBC_TUNABLES` of CPU ranks).
    victim.wait_for("before the start of training step")
    # The limit is below what the rank holds. Held memory stays, and every new allocation is refused.
    victim.ranks[1].rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))
    ended = victim.end()
    assert (ended.status.status, ended.status.rank) == (Status.OUT_OF_MEMORY, 1), ended.status


def test_a_rank_that_the_kernel_kills_for_memory_is_named(kit: Kit) -> None:
    if count_memory_kills() is None or not groups_are_enforced():
        pytest.skip("this kernel ends nothing that exceeds a memory control group")
    victim = kit.start("dp2")
    victim.wait_for("initializing torch distributed")
    with memory_group() as group:
        # Memory that the rank holds stays accounted to its earlier group. The model is not allocated yet.
        (group / "memory.limit_in_bytes").write_text(str(4 << 20))
        (group / "cgroup.procs").write_text(str(victim.ranks[1].pid))
        ended = victim.end()
    assert (ended.status.status, ended.status.rank) == (Status.OUT_OF_MEMORY, 1), ended.status
    assert "killed by the kernel" in ended.status.reason


def test_nan_stops_the_run_and_names_a_rank(kit: Kit) -> None:
    victim = kit.start("dp2")
    victim.wait_for("iteration        6/")
    victim.ranks[0].kill()
    folder = victim.end().folder
    # The first update multiplies every weight by a value beyond the range of floats.
    ended = kit.resume(folder, EXTRA=f"--weight-decay 1e38 {OVERRIDE}")
    assert ended.status.status is Status.NAN, ended.output
    assert ended.status.rank is not None
    newest, before = find_checkpoints(folder / CHECKPOINTS_FOLDER)
    assert (newest.iteration, before.iteration) == (SAVE_EVERY + 1, SAVE_EVERY)
    resumed = kit.resume(folder, EXTRA=f"--weight-decay 0.1 {OVERRIDE}")
    assert resumed.exit_code == 0, resumed.output
    assert f"{newest.path.name} is passed over" in resumed.output
    same_losses(resumed.run, kit.whole_curve("dp2"))


def test_occupied_default_port_is_not_needed(kit: Kit) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", 29500))  # This is the default port of torchrun and Megatron.
        taken.listen()
        assert kit.train("dp2", ITERS="2", SAVE_EVERY="").status.status is Status.OK


def groups_are_enforced() -> bool:
    """Return True if this machine kills a process that exceeds the memory limit of its group."""
    if not os.access(MEMORY_GROUPS, os.W_OK):
        return False
    take = "input(); held = bytearray(64 << 20)"
    with memory_group() as group:
        (group / "memory.limit_in_bytes").write_text(str(8 << 20))
        process = subprocess.Popen((sys.executable, "-c", take), stdin=subprocess.PIPE)
        (group / "cgroup.procs").write_text(str(process.pid))
        process.communicate(b"\n")
        return process.returncode == -signal.SIGKILL


def copied_data(kit: Kit, folder: Path) -> Path:
    prefix = Path(kit.environment["DATA"])
    for path in prefix.parent.glob(prefix.name.removesuffix("_text_document") + "*"):
        if path.is_file():
            shutil.copy(path, folder)
    return folder / prefix.name


@contextmanager
def memory_group() -> Iterator[Path]:
    group = MEMORY_GROUPS / f"kit-faults-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()
