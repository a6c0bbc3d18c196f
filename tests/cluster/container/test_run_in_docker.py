"""Launches with a recording Docker client: what is started, sampled, recorded and removed."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.run import DeviceLink, Status
from parakit.config.run import RuntimeName
from parakit.launch import execute as execution
from parakit.launch.compose import Launch
from parakit.launch.execute import execute_launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, Wandb
from parakit.launch.train import compose_job
from tests.launch.fake_nvml import DRIVER, FakeNvml
from tests.machines import FakeDocker

LINE = (
    " [2025-09-08 01:07:45] iteration {i:8d}/  500000 | consumed samples: {n:12d} | elapsed time per "
    "iteration (ms): 542.8 | learning rate: 2.246512E-05 | global batch size:    64 | lm loss: "
    "7.733203E+00 | loss scale: 131072.0 | grad norm: 2.639 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |\n"
)
LOG = "".join(LINE.format(i=i, n=64 * i) for i in (1, 2)) + (
    "[exiting program at iteration 2] datetime: 2025-09-08 01:07:46\n"
)
VERSIONS = {"torch": "2.8.0a0+5228986c39", "cuda": "12.9", "nccl": "2.27.3", "cudnn": "9.10.2"}


@pytest.fixture
def launch(docker: FakeDocker, sample_prefix: Path, tmp_path: Path) -> Launch:
    options = Options(
        runtime=RuntimeName.DOCKER, data=str(sample_prefix), runs=tmp_path / "runs", iterations=2
    )
    target = parse_target("train-tp2-gpt2-large-2gpu")
    return compose_job(target.with_options(options))


def run(launch: Launch, tmp_path: Path) -> tuple[Path, records.StatusRecord]:
    return execute_launch(launch, tmp_path / "runs", Console(quiet=True), "tp2")


def test_run_records_image_software_and_gpu_connections(
    launch: Launch, docker: FakeDocker, two_h200: FakeNvml, tmp_path: Path
) -> None:
    # The client is asked for the versions first, and prints its greeting before them.
    docker.answer("run", f"== PyTorch ==\n\n{LOG}{json.dumps(VERSIONS)}\n")
    folder, status = run(launch, tmp_path)
    assert (status.status, status.exit_code) == (Status.OK, 0)
    record = records.read_run(folder)
    assert (record.runtime, record.image) == (
        "docker",
        "megatron-parallelism-kit:25.06-py3-f4fa7d6b@sha256:abc123",
    )
    assert record.software == VERSIONS
    assert record.entry.megatron_commit == "f4fa7d6bb9d1"
    assert record.host.driver == DRIVER
    assert record.host.devices == ("NVIDIA H200",) * 2
    assert record.host.links == (DeviceLink(0, 1, "one NUMA node", 18, True),)
    assert record.host.interconnect == "NVLink (18 links), peer access"
    assert record.command[:2] == ("docker", "run")
    assert docker.environment("run")["KIT_LEDGER"].endswith(records.LEDGER_FOLDER)


def test_versions_of_an_image_are_queried_once(
    launch: Launch, docker: FakeDocker, two_h200: FakeNvml, tmp_path: Path
) -> None:
    docker.answer("run", f"{LOG}{json.dumps(VERSIONS)}\n")
    for _ in range(2):
        run(launch, tmp_path)
    probes = [call for call in docker.calls if "parakit.cluster.container.versions" in call]
    assert len(probes) == 1
    assert "--gpus" not in probes[0]


def test_an_image_that_reports_no_versions_does_not_stop_the_run(
    launch: Launch, docker: FakeDocker, two_h200: FakeNvml, tmp_path: Path
) -> None:
    docker.answer("run", LOG)
    folder, status = run(launch, tmp_path)
    assert status.status is Status.OK
    assert records.read_run(folder).software == {}


def test_run_without_a_container_ends_with_the_message_of_docker(
    launch: Launch, docker: FakeDocker, two_h200: FakeNvml, tmp_path: Path
) -> None:
    docker.answer("run", "", "docker: Error response from daemon: no space left.\n", 125)
    _, status = run(launch, tmp_path)
    assert status.status in (Status.CRASHED, Status.NO_LOG)
    assert not any(
        call[0] == "rm" for call in docker.calls
    )  # No container is known, and no name is guessed.


def test_gpus_are_sampled_although_the_ranks_are_in_a_container(
    launch: Launch,
    docker: FakeDocker,
    two_h200: FakeNvml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "SAMPLE_SECONDS", 0.02)
    docker.answer("run", LOG)
    folder, _ = run(launch, tmp_path)
    with (folder / records.SAMPLES_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert {row["rank"] for row in rows} == {"0", "1"}
    assert rows[0]["device"] == "NVIDIA H200"
    assert float(rows[0]["power_watts"]) == pytest.approx(654.3, abs=0.1)


def test_no_file_of_a_run_holds_the_callers_key(
    launch: Launch,
    docker: FakeDocker,
    two_h200: FakeNvml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-key")
    docker.answer("run", LOG)
    wandb = Wandb(project="mine", mode="online")
    environment = {**launch.environment, "WANDB_MODE": wandb.mode}
    logged = replace(launch, flags=(*launch.flags, *wandb.flags), environment=environment)
    folder, _ = run(logged, tmp_path)
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert any("--wandb-project" in text for text in texts)
    assert not any("s3cret" in text for text in texts)
    assert not any("s3cret" in word for call in docker.calls for word in call)
