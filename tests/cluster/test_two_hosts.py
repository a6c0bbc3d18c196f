"""`NNODES=2 NODE_RANK=… MASTER_ADDR=…` on two hosts, which are network namespaces with separate addresses."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import psutil
import pytest

from parakit.artifacts.run import Status, read_run, read_status
from parakit.config.files import ROOT
from parakit.launch.network import open_shaped_link
from parakit.logs.scrape import scrape_log
from tests.patience import OF_A_RUN, until

CAN_MAKE_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_MAKE_NAMESPACES, reason="needs root, ip and tc"),
]
ITERATIONS = 4


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    """Return the command prefixes of two hosts with the addresses 10.77.0.1 and 10.77.0.2."""
    with open_shaped_link(10**9, f"kit{os.getpid()}") as sides:
        yield tuple(side.name for side in sides)


def start(host: str, rank: int, runs: Path, data: Path, **variables: str) -> subprocess.Popen[str]:
    settings = {
        "NNODES": "2",
        "NODE_RANK": str(rank),
        "MASTER_ADDR": "10.77.0.1",
        "ITERS": str(ITERATIONS),
        "RUNS": str(runs),
        "DATA": str(data),
    }
    target = (sys.executable, "-m", "parakit", "train-pp2-gpt2-tiny-2cpu")
    return subprocess.Popen(
        ("ip", "netns", "exec", host, *target),
        cwd=ROOT,
        env={**os.environ, **settings, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trained(hosts: tuple[str, ...], runs: Path, data: Path) -> Path:
    """Return the folder of an undisturbed run on both hosts."""
    nodes = [start(host, rank, runs, data) for rank, host in enumerate(hosts)]
    outputs = [node.communicate(timeout=OF_A_RUN)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "node 1 ended with 0" in outputs[1]
    (folder,) = runs.glob("2*")
    return folder


def test_two_hosts_train_a_run_over_their_addresses(
    hosts: tuple[str, ...], tmp_path: Path, sample_prefix: Path
) -> None:
    folder = trained(hosts, tmp_path, sample_prefix)
    assert read_status(folder).status is Status.OK
    log = scrape_log(folder / "log.txt")
    assert [iteration.iteration for iteration in log.iterations] == list(range(1, ITERATIONS + 1))
    record = read_run(folder)
    assert "10.77.0.1" in (record.host.interconnect or "")
    assert record.environment["GLOO_SOCKET_IFNAME"] == hosts[0]


@pytest.mark.parametrize(
    ("rank", "variables", "reason"),
    [
        (1, {"SEED": "7"}, "all nodes must have the same"),
        (0, {}, "NODE_RANK=0 is taken by host"),
    ],
)
def test_mismatching_nodes_are_refused_before_a_folder_is_created(
    rank: int,
    variables: dict[str, str],
    reason: str,
    hosts: tuple[str, ...],
    tmp_path: Path,
    sample_prefix: Path,
) -> None:
    first = start(hosts[0], 0, tmp_path, sample_prefix)
    other = start(hosts[1], rank, tmp_path, sample_prefix, **variables)
    output, _ = other.communicate(timeout=OF_A_RUN)
    assert other.returncode == 2
    assert reason in " ".join(output.split())
    first.terminate()
    first.communicate(timeout=OF_A_RUN)
    assert not list(tmp_path.iterdir())


def test_failing_host_is_named_and_ends_the_run_on_the_other(
    hosts: tuple[str, ...], tmp_path: Path, sample_prefix: Path
) -> None:
    first, second = (
        start(host, rank, tmp_path, sample_prefix, ITERS="400") for rank, host in enumerate(hosts)
    )
    wait_for_iterations(tmp_path)
    family = [psutil.Process(second.pid), *psutil.Process(second.pid).children(recursive=True)]
    for process in reversed(family):
        process.kill()
    output, _ = first.communicate(timeout=OF_A_RUN)
    assert first.returncode == 1
    (folder,) = tmp_path.glob("2*")
    status = read_status(folder)
    assert status.status is Status.CRASHED
    assert "Node 1" in status.reason, status.reason + output
    second.communicate(timeout=OF_A_RUN)


def test_stalled_rank_on_the_other_host_is_named_and_all_stacks_are_stored(
    hosts: tuple[str, ...], tmp_path: Path, sample_prefix: Path
) -> None:
    # On this machine no start is silent for twice the time of a full run.
    undisturbed = trained(hosts, tmp_path / "before", sample_prefix)
    seconds = max(25, ceil(2 * (read_status(undisturbed).wall_seconds or 0)))
    long = {"ITERS": "400", "HANG_TIMEOUT": str(seconds)}
    first, second = (
        start(host, rank, tmp_path, sample_prefix, **long) for rank, host in enumerate(hosts)
    )
    wait_for_iterations(tmp_path)
    family = psutil.Process(second.pid).children(recursive=True)
    (rank,) = (process for process in family if process.environ().get("RANK") == "1")
    rank.suspend()
    outputs = [node.communicate(timeout=2 * OF_A_RUN)[0] for node in (first, second)]
    (folder,) = tmp_path.glob("2*")
    status = read_status(folder)
    assert (status.status, status.rank) == (Status.CRASHED, 1), outputs
    assert "was stopped by a signal" in status.reason
    stacks = sorted((folder / "stacks").glob("rank*.txt"))
    assert [path.name for path in stacks] == ["rank0.txt", "rank1.txt"]
    assert all("train" in path.read_text() for path in stacks)


def wait_for_iterations(runs: Path) -> None:
    until(
        lambda: any("iteration        2/" in log.read_text() for log in runs.glob("2*/log.txt")),
        "no second iteration",
        OF_A_RUN,
    )
