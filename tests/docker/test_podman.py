"""Containers of a real Podman: the Dockerfile built, and ranks trained."""

import json

import pytest

from tests.docker import podman as podmans
from tests.docker.conftest import TARGET, Built

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(podmans.missing()), reason=podmans.missing() or "none"),
]


def test_podman_builds_the_recipe_and_trains_cpu_ranks(built_by_podman: Built) -> None:
    victim = built_by_podman.kit.start("dp2", arguments=TARGET, SAVE_EVERY="", ITERS="3")
    ended = built_by_podman.end(victim)
    assert ended.exit_code == 0, ended.output
    record = json.loads((ended.folder / "run.json").read_text())
    assert record["runtime"] == "podman"
    assert record["command"][:2] == ["podman", "run"]
    assert record["software"]["torch"]
