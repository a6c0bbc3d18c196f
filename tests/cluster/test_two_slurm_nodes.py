"""Real jobs on a real Slurm of two nodes."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parakit.artifacts.run import Status, read_run, read_status
from parakit.config.files import ROOT
from parakit.logs.runs import load_folder
from parakit.logs.scrape import scrape_log
from parakit.reporting.analyse.parity import Curve, loss_curve
from tests.cluster.two_nodes import Cluster, obstacle, two_nodes
from tests.patience import OF_A_RUN, until

WHY_NOT = obstacle()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no Slurm here: {WHY_NOT}"),
]
ITERATIONS = 4
RECIPE = {"ITERS": str(ITERATIONS), "GLOBAL_BATCH": "8"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster: Cluster, runs: Path, data: Path, strategy: str, **variables: str) -> Path:
    """Submit a job and return its run folder."""
    settings = RECIPE | {"LAUNCHER": "slurm", "NODES": "2", "RUNS": str(runs)}
    command = (sys.executable, "-m", "parakit", f"train-{strategy}-gpt2-tiny-2cpu")
    before = set(runs.glob("2*"))
    answer = subprocess.run(
        command,
        cwd=ROOT,
        env={**cluster.environment, **settings, "DATA": str(data), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (folder,) = set(runs.glob("2*")) - before
    return folder


def job_of(folder: Path) -> str:
    return (folder / "job.json").read_text().split('"job_id": "')[1].split('"')[0]


def losses(log: Path) -> list[float | None]:
    return [iteration.lm_loss for iteration in scrape_log(log).iterations]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, sample_prefix: Path) -> list[float | None]:
    """Return the losses of the baseline on this machine without Slurm."""
    runs = tmp_path_factory.mktemp("alone")
    settings = RECIPE | {"RUNS": str(runs), "DATA": str(sample_prefix)}
    command = (sys.executable, "-m", "parakit", "train-baseline-gpt2-tiny-1cpu")
    subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=True)
    (folder,) = runs.glob("2*")
    return losses(folder / "log.txt")


@pytest.mark.parametrize("strategy", ["dp2", "pp2"])
def test_job_on_two_nodes_prints_the_losses_of_a_single_machine(
    cluster: Cluster, tmp_path: Path, sample_prefix: Path, alone: list[float | None], strategy: str
) -> None:
    folder = submit(cluster, tmp_path, sample_prefix, strategy)
    state = cluster.wait(job_of(folder), "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    output = (folder / "slurm.txt").read_text()
    assert state == "COMPLETED", output
    assert read_status(folder).status is Status.OK, output
    assert len(alone) == ITERATIONS
    # Both started from the same weights, so losses differ by at most a unit of the last printed digit.
    assert losses(folder / "log.txt") == pytest.approx(alone, abs=1.01e-6 * 10)
    host = read_run(folder).host
    assert len(host.nodes) == 2
    assert sorted(path.name for path in (folder / "ledger").glob("rank*.json")) == [
        "rank0.json",
        "rank1.json",
    ]
    ranks = {line.split(",")[1] for line in (folder / "samples.csv").read_text().splitlines()[1:]}
    assert ranks == {"0", "1"}


LONGER = {"ITERS": "24", "SAVE_EVERY": "4", "DROPOUT": "0.1"}


def curve(folder: Path) -> Curve:
    """Return losses by iteration, without the lines that Megatron averages after a start."""
    return loss_curve(load_folder(folder))


def wait_for(cluster: Cluster, folder: Path, text: str) -> None:
    log = folder / "log.txt"
    deadline = time.monotonic() + 2 * OF_A_RUN
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline, cluster.logs()
        time.sleep(0.05)


@pytest.mark.parametrize("strategy", ["dp2", "pp2"])
def test_cancelled_and_requeued_job_ends_with_the_losses_of_an_undisturbed_one(
    cluster: Cluster, tmp_path: Path, sample_prefix: Path, strategy: str
) -> None:
    # Slurm of the tests ends a cancelled job after 120 s, and the ranks may take 100 s of them for a checkpoint.
    folder = submit(cluster, tmp_path, sample_prefix, strategy, **LONGER, GRACE="100")
    job = job_of(folder)
    wait_for(cluster, folder, "iteration        6/")
    cluster.ask("scancel", job)
    assert cluster.wait(job, "CANCELLED") == "CANCELLED"
    assert read_status(folder).status is Status.INTERRUPTED
    cluster.ask("scontrol", "requeue", job)
    output = f"{cluster.wait(job, 'COMPLETED', 'FAILED')}: {(folder / 'slurm.txt').read_text()}"
    assert read_status(folder).status is Status.OK, output
    (resumption,) = read_run(folder).resumptions
    assert 6 <= resumption.iteration < 24, "a cancelled job saves before it ends"
    undisturbed = submit(cluster, tmp_path, sample_prefix, strategy, **LONGER)
    cluster.wait(job_of(undisturbed), "COMPLETED", "FAILED")
    expected, requeued = curve(undisturbed), curve(folder)
    assert max(requeued) == max(expected) == 24
    both = requeued.keys() & expected.keys()
    assert len(both) >= 22
    assert {i: requeued[i] for i in both} == {i: expected[i] for i in both}


def test_a_job_that_is_warned_of_its_end_saves_requeues_itself_and_resumes(
    cluster: Cluster, tmp_path: Path, sample_prefix: Path
) -> None:
    asked = {"ITERS": "40", "SAVE_EVERY": "1000", "GRACE": "120"}
    folder = submit(cluster, tmp_path, sample_prefix, "dp2", **asked)
    job = job_of(folder)
    wait_for(cluster, folder, "iteration        6/")
    cluster.ask("scancel", "--signal=USR1", job)  # As --signal= does before the time limit.
    wait_for(cluster, folder, "exiting program after receiving SIGTERM")
    cluster.wait(job, "PENDING", "COMPLETED")
    output = f"{cluster.wait(job, 'COMPLETED', 'FAILED')}: {(folder / 'slurm.txt').read_text()}"
    assert read_status(folder).status is Status.OK, output
    (resumption,) = read_run(folder).resumptions
    assert resumption.iteration >= 6
    assert f"is requeued and resumes from iteration {resumption.iteration}" in output


def test_sweep_trains_as_an_array_and_the_next_sweep_reuses_its_runs(
    cluster: Cluster, tmp_path: Path, sample_prefix: Path
) -> None:
    runs = tmp_path / "runs"
    axes = {"MODELS": "gpt2-tiny", "STRATEGIES": "dp2", "DEVICES": "2cpu", "NAME": tmp_path.name}
    settings = {"LAUNCHER": "slurm", "NODES": "2", "RUNS": str(runs), "DATA": str(sample_prefix)}

    def sweep() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "-m", "parakit", "sweep"),
            cwd=ROOT,
            env={**cluster.environment, **RECIPE, **axes, **settings},
            capture_output=True,
            text=True,
            check=False,
        )

    try:
        submitted = sweep()
        jobs = [job_of(folder) for folder in sorted(runs.glob("2*"))]
        assert [job.split("_")[1] for job in jobs] == ["0", "1"], submitted
        for job, folder in zip(jobs, sorted(runs.glob("2*")), strict=True):
            assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", (
                folder / "slurm.txt"
            ).read_text()
        megatron, native = (curve(folder) for folder in sorted(runs.glob("2*")))
        assert megatron.keys() & native.keys()
        for number in megatron.keys() & native.keys():
            assert megatron[number] == pytest.approx(native[number], abs=1.01e-5)
        again = sweep()
        assert again.returncode == 0, again.stdout + again.stderr
        assert len(list(runs.glob("2*"))) == 2
    finally:
        shutil.rmtree(ROOT / "reports" / tmp_path.name, ignore_errors=True)


def test_a_job_gets_its_variables_although_sbatch_was_told_to_pass_none_on(
    cluster: Cluster, tmp_path: Path, sample_prefix: Path
) -> None:
    site, seen = tmp_path / "site", tmp_path / "seen"
    site.write_text(f"printenv UCX_TLS >{seen}.new || :\nmv {seen}.new {seen}\n")
    told = {"UCX_TLS": "tcp", "SLURM_SITE": str(site), "SBATCH_EXPORT": "NONE"}
    folder = submit(cluster, tmp_path, sample_prefix, "dp2", **told)
    until(seen.exists, (folder / "job.sbatch").read_text(), OF_A_RUN)
    cluster.ask("scancel", job_of(folder))
    cluster.wait(job_of(folder), "CANCELLED", "COMPLETED", "FAILED")
    assert seen.read_text() == "tcp\n"


def test_pending_array_element_can_be_stopped_alone(
    cluster: Cluster, tmp_path: Path, sample_prefix: Path
) -> None:
    both = ("--nodes=2", "--exclusive", "--wrap", "sleep 600")
    first = cluster.ask("sbatch", "--parsable", "--output=/dev/null", *both)
    cluster.wait(first, "RUNNING")
    settings = {"LAUNCHER": "slurm", "NODES": "2", "REPEATS": "2", "DATA": str(sample_prefix)}
    environment = {**cluster.environment, "RUNS": str(tmp_path)}
    program = (sys.executable, "-m", "parakit")
    asked = (*program, "train-dp2-gpt2-tiny-2cpu")
    subprocess.run(asked, cwd=ROOT, env={**environment, **settings}, check=True)
    kept, stopped = sorted(tmp_path.glob("2*"))
    named = {**environment, "RUN": str(stopped)}
    subprocess.run((*program, "stop"), cwd=ROOT, env=named, check=True)
    assert read_status(stopped).status is Status.INTERRUPTED
    assert cluster.state(job_of(kept)) == "PENDING"
    cluster.ask("scancel", job_of(kept).partition("_")[0], first)


def test_the_doctor_asks_both_nodes_and_measures_between_them(cluster: Cluster) -> None:
    answer = subprocess.run(
        (sys.executable, "-m", "parakit.cluster.doctor.nodes"),
        cwd=ROOT,
        env={**cluster.environment, "LAUNCHER": "slurm", "NODES": "2", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Two nodes of a single machine disturb each other, so their rates may differ.
    assert answer.returncode in (0, 1), answer.stdout + answer.stderr
    assert re.search(r"what .* n1 .* n2 ", answer.stdout)
    assert re.search(r"2 nodes: gloo between 2 CPU ranks: \d+\.\d\d GB/s over", answer.stdout)
