"""Containers of a rootless Podman: the Dockerfile built, and ranks trained as an ordinary user."""

import pytest

from parakit.artifacts.run import Status
from tests.docker import podman as podmans
from tests.docker.conftest import TARGET, Built
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
