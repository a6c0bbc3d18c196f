"""What `tests/faults` does to a run on the host, done to one whose ranks are in a container."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.run import CHECKPOINTS_FOLDER, LOG_FILE, Status
from parakit.config.files import ROOT
from tests.docker import engine as engines
from tests.docker.conftest import TARGET, Built, inside
from tests.faults.runs import Kit, kill
from tests.faults.test_resources import (
    copied_data,
    fill,
    groups_are_enforced,
    memory_group,
)
from tests.patience import OF_A_RUN, PATIENCE, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(engines.missing()), reason=engines.missing() or "none"),
]
SOMEBODY = 1234
SHARED_GROUP = 4321
"""A supplementary group of the user `SOMEBODY`."""
AS_SOMEBODY = (
    # Of root it keeps that it may read everything: this Python may lie in root's home.
    *("setpriv", f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", f"--groups={SHARED_GROUP}"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
)


@pytest.mark.parametrize(
    ("who", "reason", "rank"),
    [
        ("rank 1", "Rank 1 was killed by SIGKILL", 1),
        ("torchrun", "torchrun was killed by SIGKILL", None),
    ],
)
def test_a_process_that_is_killed_in_the_container_is_named(
    built: Built, who: str, reason: str, rank: int | None
) -> None:
    victim = built.begin()
    kill(inside(victim)[who])
    status = built.end(victim).status
    assert (status.status, status.rank) == (Status.CRASHED, rank)
    assert status.reason.startswith(reason)


def test_a_pause_ends_nothing_and_make_stop_does(built: Built) -> None:
    victim = built.begin()
    rank = inside(victim)["rank 0"]
    rank.suspend()
    time.sleep(5)
    rank.resume()
    newest = (victim.folder / "log.txt").read_text().count("iteration  ")
    victim.wait_for(f"iteration {newest + 5:8d}/")
    subprocess.run((*built.kit.program, "stop", str(victim.folder)), cwd=ROOT, check=True)
    assert built.end(victim).status.status is Status.INTERRUPTED


def test_a_rank_that_was_stopped_is_named(built: Built) -> None:
    victim = built.begin(HANG_TIMEOUT=f"{PATIENCE:.0f}")
    inside(victim)["rank 1"].suspend()
    status = built.end(victim).status
    assert (status.status, status.rank) == (Status.CRASHED, 1)
    assert "was stopped by a signal" in status.reason


def test_make_alone_may_be_killed(built: Built) -> None:
    program = built.kit.program
    built.kit.program = ("sh", "-c", '"$@"; true', "sh", *program)
    try:
        victim = built.begin()
    finally:
        built.kit.program = program
    kill(victim.launcher)
    now = len((victim.folder / "log.txt").read_text().splitlines())
    until(lambda: len((victim.folder / "log.txt").read_text().splitlines()) > now, "no more lines")
    subprocess.run((*program, "stop", str(victim.folder)), cwd=ROOT, check=True)
    assert built.end(victim).status.status is Status.INTERRUPTED


def test_a_run_folder_that_is_removed_ends_its_run(built: Built) -> None:
    victim = built.begin()
    shutil.rmtree(victim.folder)
    ended = built.end(victim)
    assert ended.exit_code == 2, ended.output
    assert "was removed while its run was on" in " ".join(ended.output.split())


def test_a_taken_port_is_not_needed(built: Built) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("", 29500))
        taken.listen()
        victim = built.kit.start("dp2", arguments=TARGET, SAVE_EVERY="", ITERS="2")
        assert built.end(victim).status.status is Status.OK


@pytest.mark.parametrize("how", ["removed", "cut to nothing"])
def test_data_that_go_away_disturb_nothing_and_cut_ones_are_named(
    built: Built, tmp_path: Path, how: str
) -> None:
    data = copied_data(built.kit, tmp_path)
    victim = built.begin(DATA=str(data), ITERS="40")
    if how == "removed":
        data.with_suffix(".bin").unlink()
        assert built.end(victim).status.status is Status.OK
    else:
        os.truncate(data.with_suffix(".bin"), 0)
        status = built.end(victim).status
        assert status.status is Status.CRASHED
        assert "SIGBUS" in status.reason


def test_a_rank_that_may_have_no_more_memory_is_named(built: Built) -> None:
    victim = built.begin("initializing torch distributed", MICRO_BATCH="4", GLOBAL_BATCH="8")
    # The process is looked up before the line that the limit waits for. The first iteration allocates memory that
    # later iterations reuse, so a limit that comes after it refuses nothing.
    rank = inside(victim)["rank 1"]
    log = victim.folder / LOG_FILE
    until(
        lambda: "before the start of training step" in log.read_text(), "no step starts", OF_A_RUN
    )
    rank.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))
    status = built.end(victim).status
    assert (status.status, status.rank) == (Status.OUT_OF_MEMORY, 1), status


def test_a_rank_that_the_kernel_kills_for_memory_is_named(built: Built) -> None:
    if not groups_are_enforced():
        pytest.skip("this kernel ends nothing that exceeds a memory control group")
    victim = built.begin("initializing torch distributed")
    with memory_group() as group:
        (group / "memory.limit_in_bytes").write_text(str(4 << 20))
        (group / "cgroup.procs").write_text(str(inside(victim)["rank 1"].pid))
        status = built.end(victim).status
    assert status.status is Status.OUT_OF_MEMORY, status


def test_numbers_that_are_none_stop_the_run(built: Built) -> None:
    victim = built.kit.start(
        "dp2", arguments=TARGET, SAVE_EVERY="", EXTRA="--weight-decay 1e38 --lr-warmup-fraction 0"
    )
    assert built.end(victim).status.status is Status.NAN


def test_a_full_disk_is_named_and_a_damaged_checkpoint_passed_over(
    built: Built, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(runs))
    subprocess.run(mount, check=True)
    try:
        (runs / ".start").symlink_to((built.kit.runs / ".start").resolve())
        variables = {"RUNS": str(runs), "SAVE_EVERY": "4", "KEEP": "2"}
        victim = built.begin("iteration        9/", **variables)
        filler = fill(runs, 0)
        ended = built.end(victim)
        assert ended.status.status is Status.CRASHED
        assert "o space" in ended.status.reason
        filler.unlink()
        newest = find_checkpoints(ended.folder / CHECKPOINTS_FOLDER)[0]
        file = max(newest.path.glob("*.distcp"), key=lambda path: path.stat().st_size)
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"\x00\xff" * 64)
        # The run may save a few times more before its disk is full.
        iterations = str(newest.iteration + 8)
        resumed = built.kit.resume(ended.folder, **variables, ITERS=iterations)
        assert resumed.exit_code == 0, resumed.output
        assert f"{newest.path.name} is passed over" in " ".join(resumed.output.split())
    finally:
        subprocess.run(("umount", "--lazy", str(runs)), check=True)


def refused(kit: Kit, environment: Mapping[str, str]) -> str:
    """What a run is refused with."""
    command = (*kit.program, *TARGET)
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2, answer.stdout
    return answer.stderr


def copy_for_group(source: Path, folder: Path, group: int) -> Path:
    """Copy a folder so that besides root only the members of a group can read the copy; return the copy."""
    shutil.copytree(source, folder)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 0, group)
        path.chmod(0o750 if path.is_dir() else 0o640)
    return folder


def test_another_user_trains_as_oneself_and_is_refused_what_is_not_allowed(
    built: Built, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A number without a name in the image; no right to the socket; a folder that is others'; data for a group."""
    # pytest's own folder lets nobody else through.
    user_folder = Path(tempfile.mkdtemp())
    user_folder.chmod(0o755)
    request.addfinalizer(lambda: shutil.rmtree(user_folder))
    home, runs = user_folder / "home", user_folder / "runs"
    for folder in (home, runs):
        folder.mkdir()
        os.chown(folder, SOMEBODY, SOMEBODY)
    prefix = Path(built.kit.environment["DATA"])
    data = copy_for_group(prefix.parent, user_folder / "data", SHARED_GROUP)
    kit = Kit(tmp_path, data / prefix.name, tmp_path / "start")
    own_environment = {"DATA": str(data / prefix.name), "RUNS": str(runs), "HOME": str(home)}
    kit.environment = {**built.kit.environment, **own_environment}
    kit.program = (*AS_SOMEBODY, *built.kit.program)
    refusal = refused(kit, kit.environment)
    assert "permission denied" in refusal
    assert "RUNTIME=host" in refusal
    Path(built.engine.address.removeprefix("unix://")).chmod(0o666)
    foreign_environment = {**kit.environment, "RUNS": str(tmp_path / "disturbed")}
    assert "Traceback" not in refused(kit, foreign_environment)
    victim = kit.start("dp2", arguments=TARGET, SAVE_EVERY="", ITERS="2", RUNS=str(runs))
    ended = built.end(victim)
    assert ended.exit_code == 0, ended.output
    assert {path.stat().st_uid for path in ended.folder.rglob("*")} == {SOMEBODY}
