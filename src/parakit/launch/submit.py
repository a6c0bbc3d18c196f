"""`LAUNCHER=slurm make train-…`: a run folder, a script in it, and a job in the queue."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.cluster import (
    IMAGE_PYTHON,
    ArrayTask,
    BatchJob,
    Container,
    Nodes,
    data_folders,
    find_pair,
    inherited_names,
    pyxis_flags,
    render_batch_script,
    run_program,
)
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.run import DeviceKind, RuntimeName
from parakit.formatting.terminal import say
from parakit.launch.compose import RUN_PLACEHOLDER, Launch
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.run_folder import create_run_folder

SCRIPT_FILE = "job.sbatch"
SUBMIT_SECONDS = 60.0
SETTLED_VARIABLES = ("REPEATS", "RUN_FOLDER", "RUNTIME", "DRY_RUN", "IMAGE")
"""Variables that the job is not given, because they are settled when it is submitted."""

WANDB_NAMES = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT")


def submit_run(launch: Launch, console: Console) -> int:
    """Submit a run, or its repeats as an array; 0, or the script alone with DRY_RUN=1.

    Raises:
        LaunchError: The run cannot work, or Slurm is not here or refuses it; nothing was written.
    """
    options = launch.job.options
    assert options.slurm is not None
    spread = spread_over_nodes(launch, options.slurm.nodes)
    each = [spread] * options.repeats
    if options.dry_run:  # The script first, then why it would be refused.
        submit_array(launch.job.name, each, console)
    check_launch(spread)
    if not options.dry_run:
        submit_array(launch.job.name, each, console)
    return 0


def submit_array(name: str, each: Sequence[Launch], console: Console) -> None:
    """Submit runs of one size as one job, an array if there are several; a dry run prints the script.

    Raises:
        LaunchError: Slurm is not here or refuses it, and nothing was written; or it gives no answer, and
            the run folders stay for a job that it may have taken.
    """
    first, options = each[0], each[0].job.options
    job = _job(name, first)
    if options.dry_run:
        tasks = tuple(_cell(RUN_PLACEHOLDER, one) for one in each)
        print(render_batch_script(replace(job, tasks=tasks)))
        return
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "LAUNCHER=slurm needs Slurm's client (no 'sbatch' on PATH); run this on the cluster's login "
            "node, or use NNODES= NODE_RANK= MASTER_ADDR= on each host."
        )
    folders = tuple(create_run_folder(one, options.runs) for one in each)
    tasks = tuple(
        _cell(relative_to_root(folder), one) for folder, one in zip(folders, each, strict=True)
    )
    job_id = _hand_over(replace(job, tasks=tasks), folders, choose_image(first))
    for folder in folders:
        say(console, f"job {job_id}: {relative_to_root(folder)}")
    console.print("'make status' follows it.", highlight=False)


def spread_over_nodes(launch: Launch, count: int) -> Launch:
    """The launch as it will be spread; the nodes' addresses are known once they are there."""
    options = launch.job.options
    assert options.slurm is not None
    job = launch.job.with_options(replace(options, slurm=replace(options.slurm, nodes=count)))
    return replace(launch, job=job, nodes=Nodes(count, 0, "the first node's address"))


def choose_image(launch: Launch) -> str | None:
    """The image of the kit's that ranks are to run in if Slurm has Pyxis; None for the host.

    Raises:
        LaunchError: IMAGE= names no pair.
    """
    options = launch.job.options
    if launch.spec.device is DeviceKind.CPU or options.runtime is RuntimeName.HOST:
        return None
    named = options.slurm.image if options.slurm else None
    return named or find_pair(options.image).name


def _job(name: str, launch: Launch) -> BatchJob:
    options, container = launch.job.options, _container(launch)
    assert options.slurm is not None
    return BatchJob(
        name=name,
        device=launch.spec.device,
        devices_per_node=launch.local_devices,
        slurm=options.slurm,
        tasks=(),
        python=IMAGE_PYTHON if container else sys.executable,
        inherited=list_inherited_variables(options),
        container=container,
    )


def list_inherited_variables(options: Options) -> tuple[str, ...]:
    """Names of the submitter's variables that the job gets; keys only for what was asked for.

    Slurm keeps a job's variables in its own spool until the job has ended.
    """
    names = [name for name in inherited_names(*WANDB_NAMES) if name != "CUDA_VISIBLE_DEVICES"]
    return tuple(name for name in names if options.wandb or name not in WANDB_NAMES)


def _container(launch: Launch) -> tuple[str, ...]:
    """srun's flags of the kit's image where Pyxis is, for GPU ranks; none for the host."""
    options = launch.job.options
    named = options.slurm.image if options.slurm else None
    if choose_image(launch) is None:
        return ()
    if "--container-image" not in run_program(["srun", "--help"], SUBMIT_SECONDS).out:
        if options.runtime is RuntimeName.DOCKER or named:
            raise LaunchError(
                "Slurm here has no Pyxis (srun knows no --container-image), so no container can be "
                "started; set RUNTIME=host."
            )
        return ()
    pair = find_pair(options.image)
    squashed = ROOT / "docker" / f"{pair.name.replace(':', '+')}.sqsh"
    if named is None and not squashed.is_file():
        raise LaunchError(
            f"{squashed} is not there; make it where Docker is with 'make image' and 'enroot import "
            f"--output {squashed} dockerd://{pair.name}', name another with SLURM_IMAGE=, or set "
            "RUNTIME=host."
        )
    folders = (ROOT, *data_folders(launch.data_path), options.runs.absolute())
    mounts = Container("", "", mounts=()).mounting(*folders).mounts
    return pyxis_flags(named or str(squashed), mounts)


def _cell(folder: str, launch: Launch) -> ArrayTask:
    job = launch.job
    given = {name: text for name, text in job.variables.items() if name not in SETTLED_VARIABLES}
    # The job is in its container already, or to have none.
    return ArrayTask(folder, job.parakit_arguments, {**given, "RUNTIME": RuntimeName.HOST.value})


def _hand_over(job: BatchJob, folders: Sequence[Path], image: str | None) -> str:
    """Write the script into every run folder and submit it; the job's number."""
    said = "Waits in Slurm's queue."
    waiting = records.StatusRecord(records.Status.INCOMPLETE, None, said)
    try:
        text = render_batch_script(job)
        for folder in folders:
            (folder / SCRIPT_FILE).write_text(text)
            write_record(folder / records.STATUS_FILE, waiting)
        slurm_job = _sbatch(folders[0] / SCRIPT_FILE)
    except subprocess.TimeoutExpired:
        names = ", ".join(map(str, folders))
        raise LaunchError(
            f"sbatch gave no answer within {SUBMIT_SECONDS:.0f} s, so Slurm may have taken the job: "
            f"look for {job.name} with 'squeue --me', and remove {names} if it is not there."
        ) from None
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    for element, folder in enumerate(folders):
        own = slurm_job if len(folders) == 1 else f"{slurm_job}_{element}"
        submitted = records.encode_run(records.read_run(folder))
        record = records.JobRecord(own, job.slurm.nodes, records.utc_now(), image, submitted)
        write_record(folder / records.JOB_FILE, record)
    return slurm_job


def _sbatch(path: Path) -> str:
    command = ("sbatch", "--parsable", str(path))
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SUBMIT_SECONDS, cwd=ROOT
        )
    except OSError as error:
        raise LaunchError(f"'{shlex.join(command)}' cannot be run ({error}).") from None
    if answer.returncode:
        said = " ".join(answer.stderr.split()).removeprefix("sbatch: ")
        raise LaunchError(f"Slurm refuses the job: {said}")
    # The cluster's name follows where there are several.
    return answer.stdout.strip().partition(";")[0]
