"""Containers of a rootless Podman: the Dockerfile built, and ranks trained as an ordinary user."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from parakit.artifacts.run import Status
from parakit.cluster.checks.docker import ContainerEngine
from parakit.cluster.container.docker import PodmanContainer, container_groups
from parakit.config.files import ROOT
from tests.docker import podman as podmans
from tests.docker.conftest import TARGET, Built
from tests.docker.engine import BASE
from tests.faults.runs import kill

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(podmans.missing_for_rootless()), reason=podmans.missing_for_rootless() or "none"
    ),
]


def test_a_rootless_podman_trains_and_the_files_belong_to_its_caller(
    built_by_rootless_podman: Built,
) -> None:
    built = built_by_rootless_podman
    ended = built.end(built.kit.start("dp2", arguments=TARGET, SAVE_EVERY="", ITERS="3"))
    assert ended.exit_code == 0, ended.output
    user = podmans.find_user()
    assert user is not None
    assert {path.stat().st_uid for path in ended.folder.rglob("*")} == {user.pw_uid}


def test_a_killed_client_of_a_rootless_podman_is_named_and_its_container_ended(
    built_by_rootless_podman: Built,
) -> None:
    victim = built_by_rootless_podman.begin()
    for process in victim.family:
        if process.name() == "podman":
            kill(process)
    status = built_by_rootless_podman.end(victim).status
    assert status.status is Status.CRASHED
    assert status.reason.startswith("Podman's client ended by SIGKILL after iteration")


SHARED_GROUP = 4321


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(shutil.which("crun") is None, reason="keeping groups needs crun")
def test_a_rootless_podman_reads_what_a_group_of_its_caller_may_read(open_folder: Path) -> None:
    user = podmans.find_user()
    assert user is not None
    data = open_folder / "data"
    data.mkdir()
    file = data / "text"
    file.write_text("for the group\n")
    for path, mode in ((data, 0o750), (file, 0o640)):
        os.chown(path, 0, SHARED_GROUP)
        path.chmod(mode)
    groups = container_groups(ContainerEngine(gives_gpus=False, rootless=True), "podman")
    number = f"{user.pw_uid}:{user.pw_gid}"
    answers = []
    with podmans.running(
        open_folder / "podman", user=user, runtime="crun", group=SHARED_GROUP
    ) as podman:
        for of_container in (groups, ()):
            container = PodmanContainer(
                BASE, number, (ROOT, data), gpus=False, groups=of_container, rootless=True
            )
            command = (*podman.prefix, *container.wrap(("cat", str(file)), ()))
            answers.append(
                subprocess.run(
                    command,
                    env={**os.environ, **podman.environment},
                    capture_output=True,
                    text=True,
                    check=False,
                )
            )
    kept, dropped = answers
    assert kept.stdout == "for the group\n", kept.stderr
    assert "Permission denied" in dropped.stderr
