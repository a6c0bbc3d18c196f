"""`LAUNCHER=slurm make train-…`: make a run folder with a batch script in it, and submit a Slurm job."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.cluster import (
    IMAGE_PYTHON,
    MODULES,
    ArrayTask,
    BatchJob,
    Container,
    Nodes,
    data_folders,
    find_pair,
    find_replacing_variables,
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
from parakit.launch.flags import EXIT_SIGNAL_HANDLER
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.run_folder import create_run_folder

SCRIPT_FILE = "job.sbatch"
SUBMIT_SECONDS = 60.0
GRACE_SECONDS = 120
"""Time for a last checkpoint before a job's end unless GRACE= names another. What saves take is not known yet."""
MARGIN_SECONDS = 15
"""Time for Slurm's signal to arrive, and for the launcher to write its last status."""
SETTLED_VARIABLES = ("REPEATS", "RUN_FOLDER", "RUNTIME", "DRY_RUN", "IMAGE")
"""Variables that the job does not get, because they take effect when the job is submitted."""

NODE_RUNTIMES = (RuntimeName.APPTAINER, RuntimeName.PODMAN)
"""Runtimes whose containers the launcher of each node starts. Slurm itself starts containers by Pyxis alone."""

WANDB_NAMES = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT")


def submit_run(launch: Launch, console: Console) -> int:
    """Submit a run, or its repeats as an array; return 0. With DRY_RUN=1 only print the script.

    Raises:
        LaunchError: The run cannot work, or Slurm is missing or refuses the job; nothing was written.
    """
    options = launch.job.options
    assert options.slurm is not None
    launch_on_nodes = spread_over_nodes(launch, options.slurm.nodes)
    launches = [launch_on_nodes] * options.repeats
    if options.dry_run:
        # The script is printed before the check, so that the user sees what would be refused.
        submit_array(launch.job.name, launches, console)
    check_launch(launch_on_nodes)
    if not options.dry_run:
        submit_array(launch.job.name, launches, console)
    return 0


def submit_array(name: str, launches: Sequence[Launch], console: Console) -> None:
    """Submit launches of one size as one Slurm job, as an array if there are several; print the run folders.

    With DRY_RUN=1 only the script is printed.

    Raises:
        LaunchError: Slurm is missing or refuses the job, and nothing was written; or Slurm gives no answer,
            and the run folders stay because Slurm may have taken the job.
    """
    first, options = launches[0], launches[0].job.options
    job = _describe_job(name, first)
    if options.dry_run:
        tasks = tuple(_describe_task(RUN_PLACEHOLDER, launch) for launch in launches)
        print(render_batch_script(replace(job, tasks=tasks)))
        return
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "LAUNCHER=slurm needs Slurm's client (no 'sbatch' on PATH); run this on the cluster's login "
            "node, or use NNODES= NODE_RANK= MASTER_ADDR= on each host."
        )
    folders = tuple(create_run_folder(launch, options.runs) for launch in launches)
    tasks = tuple(
        _describe_task(relative_to_root(folder), launch)
        for folder, launch in zip(folders, launches, strict=True)
    )
    job_id = _write_and_submit(replace(job, tasks=tasks), folders, choose_image(first))
    for folder in folders:
        say(console, f"job {job_id}: {relative_to_root(folder)}")
    if replacing := find_replacing_variables(job, os.environ):
        left_out = ", ".join(replacing)
        console.print(f"Not used, because the script states it: {left_out}.", highlight=False)
    passed_on = ", ".join(job.inherited) or "none"
    console.print(f"Variables passed on to it: {passed_on}.", highlight=False)
    console.print("'make status' follows it.", highlight=False)


def spread_over_nodes(launch: Launch, count: int) -> Launch:
    """Return the launch on `count` nodes. Their addresses are not known before the job starts."""
    options = launch.job.options
    assert options.slurm is not None
    job = launch.job.with_options(replace(options, slurm=replace(options.slurm, nodes=count)))
    return replace(launch, job=job, nodes=Nodes(count, 0, "the first node's address"))


def choose_image(launch: Launch) -> str | None:
    """Return the image in which ranks run if Slurm has Pyxis or RUNTIME= is one of NODE_RUNTIMES; None for the host.

    Raises:
        LaunchError: IMAGE= names no image pair.
    """
    options = launch.job.options
    if options.runtime in NODE_RUNTIMES:
        return find_pair(options.image).name
    if launch.spec.device is DeviceKind.CPU or options.runtime is RuntimeName.HOST:
        return None
    slurm_image = options.slurm.image if options.slurm else None
    return slurm_image or find_pair(options.image).name


def _describe_job(name: str, launch: Launch) -> BatchJob:
    """Return the batch job of launches like this one, still without its tasks."""
    options, container_flags = launch.job.options, _choose_container_flags(launch)
    assert options.slurm is not None
    return BatchJob(
        name=name,
        device=launch.spec.device,
        devices_per_node=launch.local_devices,
        slurm=options.slurm,
        tasks=(),
        python=IMAGE_PYTHON if container_flags else sys.executable,
        inherited=list_inherited_variables(options, in_container=bool(container_flags)),
        warning_seconds=_choose_warning_seconds(options),
        container=container_flags,
    )


def _choose_warning_seconds(options: Options) -> int | None:
    """Return the time before its end at which a job is warned: GRACE= and a margin; None if it saves nothing."""
    if options.saving is None:
        return None
    return (options.grace_seconds or GRACE_SECONDS) + MARGIN_SECONDS


def list_inherited_variables(options: Options, in_container: bool = False) -> tuple[str, ...]:
    """Return the names of this process's variables that the job gets; W&B's only if WANDB= is set.

    Slurm stores a job's variables in its own spool until the job has ended, so no other key is passed. Variables
    of environment modules are passed if the site's shell lines may load some. Ranks in a container have other folders,
    so variables that name one, such as TRITON_CACHE_DIR, are not passed to them.
    """
    candidates = list(WANDB_NAMES)
    if options.slurm is not None and options.slurm.setup:
        candidates += filter(_is_module_variable, os.environ)
    left_out = {"CUDA_VISIBLE_DEVICES"}
    if not options.wandb:
        left_out.update(WANDB_NAMES)
    names = inherited_names(*candidates, in_container=in_container)
    return tuple(name for name in names if name not in left_out)


def _is_module_variable(name: str) -> bool:
    """Return True if a variable belongs to the program `module` of environment modules."""
    return any(fnmatchcase(name, pattern) for pattern in MODULES)


def _choose_container_flags(launch: Launch) -> tuple[str, ...]:
    """Return srun's flags of the kit's image for GPU ranks if Slurm has Pyxis.

    The result is empty for the host, and for containers that the launchers of the nodes start.

    Raises:
        LaunchError: A container was asked for and Slurm has no Pyxis, the image's file is missing, or SLURM_IMAGE=
            names an image for Pyxis and RUNTIME= another program.
    """
    if choose_image(launch) is None:
        return ()
    options = launch.job.options
    slurm_image = options.slurm.image if options.slurm else None
    if options.runtime in NODE_RUNTIMES:
        if slurm_image:
            raise LaunchError(
                f"SLURM_IMAGE={slurm_image} is an image for Pyxis, but RUNTIME={options.runtime} starts containers "
                "without it; leave one of them out."
            )
        return ()
    has_pyxis = "--container-image" in run_program(["srun", "--help"], SUBMIT_SECONDS).out
    if not has_pyxis:
        if options.runtime is RuntimeName.DOCKER or slurm_image:
            raise LaunchError(
                "Slurm here has no Pyxis (srun knows no --container-image), so no container can be "
                "started; set RUNTIME=host."
            )
        return ()
    pair = find_pair(options.image)
    image_file = ROOT / "docker" / f"{pair.name.replace(':', '+')}.sqsh"
    if slurm_image is None and not image_file.is_file():
        raise LaunchError(
            f"{image_file} is not there; make it where Docker is with 'make image' and 'enroot import "
            f"--output {image_file} dockerd://{pair.name}', name another with SLURM_IMAGE=, or set "
            "RUNTIME=host."
        )
    folders = [ROOT]
    for path in launch.data_paths:
        folders += data_folders(path)
    folders.append(options.runs.absolute())
    # A container leaves out folders that lie in other mounted folders.
    mounts = Container("", "", mounts=()).mounting(*folders).mounts
    return pyxis_flags(slurm_image or str(image_file), mounts)


def _describe_task(folder: str, launch: Launch) -> ArrayTask:
    """Return the array task that trains a run in the run folder `folder`.

    The task has the run's arguments and make variables. Its launchers start a container only if RUNTIME= is one of
    NODE_RUNTIMES.
    """
    job = launch.job
    variables = {
        name: text for name, text in job.variables.items() if name not in SETTLED_VARIABLES
    }
    # A task of Pyxis already runs in its container, so it must not start another.
    runtime = RuntimeName.HOST
    if job.options.runtime in NODE_RUNTIMES:
        runtime = job.options.runtime
        if job.options.image is not None:
            variables["IMAGE"] = job.options.image
    arguments = job.parakit_arguments
    if launch.saving is not None and not launch.saves_at_stop:
        # The job may be preempted, or reach its time limit.
        arguments = (*arguments, EXIT_SIGNAL_HANDLER)
    return ArrayTask(folder, arguments, {**variables, "RUNTIME": runtime.value})


def _write_and_submit(job: BatchJob, folders: Sequence[Path], image: str | None) -> str:
    """Write the script into every run folder, submit it, and return the number of the job.

    The run folders are removed if Slurm refuses the job.
    """
    reason = "Waits in Slurm's queue."
    waiting = records.StatusRecord(records.Status.INCOMPLETE, None, reason)
    try:
        text = render_batch_script(job)
        for folder in folders:
            (folder / SCRIPT_FILE).write_text(text)
            write_record(folder / records.STATUS_FILE, waiting)
        replacing = find_replacing_variables(job, os.environ)
        environment = {name: text for name, text in os.environ.items() if name not in replacing}
        slurm_job = _run_sbatch(folders[0] / SCRIPT_FILE, environment)
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
    _write_job_records(slurm_job, job.slurm.nodes, folders, image)
    return slurm_job


def _write_job_records(
    slurm_job: str, nodes: int, folders: Sequence[Path], image: str | None
) -> None:
    """Write `job.json` into every run folder; a task of an array is named by the job and the task's index."""
    for index, folder in enumerate(folders):
        task_id = slurm_job if len(folders) == 1 else f"{slurm_job}_{index}"
        submitted = records.encode_run(records.read_run(folder))
        record = records.JobRecord(task_id, nodes, records.utc_now(), image, submitted)
        write_record(folder / records.JOB_FILE, record)


def _run_sbatch(path: Path, environment: Mapping[str, str]) -> str:
    """Submit a script with an environment and return the number of the job.

    Raises:
        LaunchError: sbatch cannot be run or refuses the script.
    """
    command = ("sbatch", "--parsable", str(path))
    try:
        answer = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SUBMIT_SECONDS,
            cwd=ROOT,
        )
    except OSError as error:
        raise LaunchError(f"'{shlex.join(command)}' cannot be run ({error}).") from None
    if answer.returncode:
        reason = " ".join(answer.stderr.split()).removeprefix("sbatch: ")
        raise LaunchError(f"Slurm refuses the job: {reason}")
    # sbatch prints the cluster's name after the number if there are several clusters.
    return answer.stdout.strip().partition(";")[0]
