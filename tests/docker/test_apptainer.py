"""Containers of a real Apptainer: a SIF file made of the built image, ranks trained, and runs that end early."""

import json
import shutil
import signal
import subprocess
from dataclasses import dataclass

import pytest

from parakit.artifacts.run import Status
from parakit.cluster.checks.apptainer import sif_file
from parakit.cluster.container.image import read_pairs
from tests.docker import podman as podmans
from tests.docker.conftest import TARGET, Built
from tests.docker.engine import find_mounts
from tests.faults.runs import Kit, Victim, kill


def missing() -> str:
    """Return what this machine lacks for containers of Apptainer; empty if nothing."""
    if lack := podmans.missing():
        return lack
    return "" if shutil.which("apptainer") else "no apptainer on PATH"


pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "none"),
]


@dataclass(frozen=True)
class ApptainerKit:
    """The kit with a SIF file of its image."""

    kit: Kit
    variables: dict[str, str]

    def start(self, **variables: str) -> Victim:
        return self.kit.start("dp2", arguments=TARGET, **self.variables, **variables)

    def begin(self) -> Victim:
        """Start a run and return it once it has logged two iterations."""
        victim = self.start()
        victim.wait_for("iteration        2/")
        return victim


@pytest.fixture(scope="module")
def apptainer(built_by_podman: Built, tmp_path_factory: pytest.TempPathFactory) -> ApptainerKit:
    folder = built_by_podman.kit.runs.parent
    (pair,) = read_pairs(folder / "versions.env")
    archive = tmp_path_factory.mktemp("sif") / "image.tar"
    built_by_podman.engine.docker(
        "save", "--format", "docker-archive", "--output", str(archive), pair.name
    )
    file = folder / sif_file(pair.name).name
    build = ("apptainer", "build", str(file), f"docker-archive:{archive}")
    answer = subprocess.run(build, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    mounts = find_mounts(folder / "megatron-lm")
    binds = ",".join(f"{source}:{path}:ro" for path, source in mounts.items())
    variables = {"RUNTIME": "apptainer", "SAVE_EVERY": "", "APPTAINER_BIND": binds}
    # Root of this machine may lack a capability that Apptainer's root asks for; in its own namespace it does not.
    return ApptainerKit(built_by_podman.kit, {**variables, "APPTAINER_USERNS": "1"})


def test_apptainer_trains_cpu_ranks_in_the_image(apptainer: ApptainerKit) -> None:
    ended = apptainer.start(ITERS="3").end()
    assert ended.exit_code == 0, ended.output
    record = json.loads((ended.folder / "run.json").read_text())
    assert record["runtime"] == "apptainer"
    assert record["command"][0].endswith("docker/apptainer_exec.sh")
    assert record["software"]["torch"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_ends_its_ranks_in_apptainer(
    apptainer: ApptainerKit, number: signal.Signals
) -> None:
    victim = apptainer.begin()
    victim.launcher.send_signal(number)
    assert victim.end().status.status is Status.INTERRUPTED


def test_a_killed_launcher_leaves_no_rank_in_apptainer(apptainer: ApptainerKit) -> None:
    victim = apptainer.begin()
    kill(victim.processes["launcher"])
    assert victim.end().status.reason.startswith("The launcher was killed after iteration")


def test_a_rank_that_is_killed_in_apptainer_is_named(apptainer: ApptainerKit) -> None:
    victim = apptainer.begin()
    kill(victim.processes["rank 1"])
    status = victim.end().status
    assert (status.status, status.rank) == (Status.CRASHED, 1)
    assert status.reason.startswith("Rank 1 was killed by SIGKILL")
