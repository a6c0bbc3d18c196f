"""Make the run folder before the first process starts, and record machine and software of the run in it."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from parakit.artifacts import run as records
from parakit.artifacts.checkpoints import read_verified_weights_hash, set_aside_newer_checkpoints
from parakit.artifacts.identity import (
    CodeIdentity,
    Identity,
    TrainingIdentity,
    identify_host,
    identify_training,
    parse_flag_values,
    sorted_pairs,
)
from parakit.artifacts.io import lock_file, write_record
from parakit.cluster import Nodes, image_tag, installed_versions, read_image_versions
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.run import DeviceKind
from parakit.data import open_dataset
from parakit.formatting.units import bit_rate
from parakit.launch.code import read_kit_commit
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.devices import (
    Gpu,
    describe_links,
    driver_version,
    find_links,
    processor_name,
    visible_gpus,
)
from parakit.launch.supervise.exit_status import reserve_room
from parakit.logs import describe_newest_runs

LOCK_FILE = ".lock"
IMAGES_FOLDER = ".images"
"""Folder in the runs folder with a file of software versions per image, named by the image's digest. A container
must be started to read the versions, so they are stored.
"""


def create_run_folder(launch: Launch, runs: Path, folder: Path | None = None) -> Path:
    """Return the run's folder, with everything in it that is known before the run: record, command, first status.

    `folder` was made before, for example when the run was put into Slurm's queue; None makes a folder in
    `runs`. If the launch resumes from a checkpoint in `folder`, the files of its last attempt are moved to
    `attempts/`.

    Raises:
        LaunchError: The disk refuses the folder or a file.
    """
    if folder is not None and launch.resume_point and launch.resume_point.run == folder.name:
        return _prepare_next_attempt(folder, launch, launch.resume_point)
    with _name_refused_path(runs):
        folder = folder or _make_folder(launch, runs)
        record = build_run_record(launch, folder)
        (folder / records.COMMAND_FILE).write_text(format_command_script(record))
        (folder / records.COMMAND_FILE).chmod(0o755)
        _write_first_status(folder, record)
    return folder


def _prepare_next_attempt(folder: Path, launch: Launch, resume_point: ResumePoint) -> Path:
    """Make a run's folder ready for its next attempt and move the files of its last one to `attempts/`.

    Checkpoints that are newer than the one to resume from are set aside.
    """
    last_record = records.read_run(folder)
    with _name_refused_path(folder):
        attempts = folder / records.ATTEMPTS_FOLDER
        attempt = attempts / str(1 + len(last_record.resumptions))
        attempt.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / records.RUN_FILE, attempt)
        for name in _ATTEMPT_FILES:
            if (folder / name).exists():
                (folder / name).rename(attempt / name)
        set_aside_newer_checkpoints(resume_point.folder, resume_point.iteration)
        new_record = build_run_record(launch, folder)
        resumptions = (*last_record.resumptions, *new_record.resumptions)
        record = replace(new_record, created_utc=last_record.created_utc, resumptions=resumptions)
        _write_first_status(folder, record)
    return folder


@contextmanager
def hold_run_folder(run: Path | None, nodes: Nodes | None) -> Iterator[None]:
    """Lock a run folder during the `with` block, so that no other launcher trains in it.

    Nothing is locked if `run` is None, because the folder is still to be made, or on any node but the first.

    Raises:
        LaunchError: `run` is no folder, another launcher holds it, or a rank of the run still lives.
    """
    if run is None or (nodes is not None and nodes.rank > 0):
        yield
        return
    if not run.is_dir():
        raise LaunchError(f"RUN_FOLDER={run} is no folder; make it, or leave RUN_FOLDER= out.")
    still_running = LaunchError(f"{run} is still running; stop it before it is resumed.")
    with (run / LOCK_FILE).open("ab") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            raise still_running from None
        if records.is_running(run / records.LOG_FILE):
            raise still_running
        yield


def read_named_run(folder: Path, otherwise: str = "") -> records.RunRecord:
    """Return the record of the run that `RUN=` names.

    Args:
        folder: The run folder.
        otherwise: What the user may name instead, as the end of a sentence.

    Raises:
        LaunchError: The folder is no run folder, or its record has another version's format or cannot be
            read.
    """
    try:
        return records.read_run(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise LaunchError(
            f"RUN={relative_to_root(folder)} is no run folder: it has no {records.RUN_FILE}; "
            f"{describe_newest_runs(folder.parent, ROOT / 'runs')}{otherwise}."
        ) from None
    except OSError as error:
        raise LaunchError(
            f"{folder / records.RUN_FILE} cannot be read ({error.strerror}); name the folder of another "
            "run, or put the file back."
        ) from None
    except msgspec.DecodeError as error:
        raise LaunchError(
            f"{folder / records.RUN_FILE} was not written by this version of the kit ({error}); name "
            "another run."
        ) from None


def build_run_record(launch: Launch, folder: Path) -> records.RunRecord:
    """Return everything that `run.json` holds, with machine and software as they are now."""
    path = relative_to_root(folder)
    initial, resume_point = launch.initial_checkpoint, launch.resume_point
    software, image = _find_software(launch, folder.parent)
    code = launch.code
    resumptions: tuple[records.Resumption, ...] = ()
    if resume_point:
        resumptions = (records.Resumption(resume_point.run, resume_point.iteration),)
        # A resumed run also records the code that trained up to its checkpoint, if that was other code.
        code_before = records.read_run(folder.parent / resume_point.run).code
        if code_before:
            code = code_before.joined(code)
    return records.RunRecord(
        run=folder.name,
        created_utc=records.utc_now(),
        spec=launch.spec,
        exit_interval=launch.iterations,
        argv=launch.arguments(path),
        command=launch.command(path),
        dataset=_identify_dataset(launch),
        start_checkpoint=initial.name if initial else None,
        start_weights=read_verified_weights_hash(initial) if initial else None,
        environment=launch.environment,
        entry=launch.entry,
        host=find_host(launch),
        software=software,
        kit_commit=read_kit_commit(),
        code=code,
        runtime=launch.runtime.name,
        image=image,
        save_every=launch.saving.every if launch.saving else None,
        resumptions=resumptions,
    )


def _identify_dataset(launch: Launch) -> records.DatasetIdentity:
    """Return the data set's path and the hash of its content. A blend has the path and hash of each data set too."""
    hashes = [open_dataset(path).content_sha256 for path in launch.data_paths]
    if len(hashes) == 1:
        return records.DatasetIdentity(launch.data, hashes[0])
    parts = tuple(
        records.BlendPartIdentity(part.prefix, part.weight, sha256)
        for part, sha256 in zip(launch.data_parts, hashes, strict=True)
    )
    text = "\n".join(f"{part.weight} {part.sha256}" for part in parts)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return records.DatasetIdentity(launch.data, sha256, parts)


def identify_computation(launch: Launch) -> TrainingIdentity:
    """Return the identity of what a launch trains, which does not depend on its folder or machine."""
    arguments = parse_flag_values(launch.arguments())
    return identify_training(
        launch.spec,
        arguments,
        launch.iterations,
        launch.environment,
        _identify_dataset(launch).sha256,
    )


def identify_launch(launch: Launch, runs: Path) -> Identity:
    """Return the identity that a run of this launch would have on this machine."""
    software, image = _find_software(launch, runs)
    code = CodeIdentity(launch.entry, launch.code, sorted_pairs(software), image)
    return Identity(identify_computation(launch), code, identify_host(find_host(launch)))


def record_launcher(folder: Path) -> None:
    """Write to the run folder that this process trains the run.

    Raises:
        LaunchError: The disk refuses the file.
    """
    started = psutil.Process().create_time()
    launcher = records.LauncherRecord(platform.node(), os.getpid(), started)
    with _name_refused_path(folder):
        write_record(folder / records.LAUNCHER_FILE, launcher)


def format_command_script(record: records.RunRecord) -> str:
    """Return a shell script that repeats the run's training from any folder.

    The script looks for the kit in the folders above it, and then where the kit is now. `KIT=` names another
    folder.
    """
    assignments = " \\\n  ".join(
        f"{name}={shlex.quote(value)}" for name, value in record.environment.items()
    )
    nodes = record.host.nodes
    node_comment = (
        f"# The command of node 0; the {len(nodes)} nodes were {', '.join(nodes)}.\n"
        if nodes
        else ""
    )
    return (
        "#!/usr/bin/env bash\n"
        f"{node_comment}"
        f"# Repeats {record.run}; what it writes besides its output goes to that run's folder.\n"
        "set -euo pipefail\n"
        f"{_FIND_KIT.format(kit=shlex.quote(str(ROOT)))}"
        f"exec env \\\n  {assignments} \\\n  {shlex.join(record.command)}\n"
    )


_FIND_KIT = """\
is_kit() {{ [[ -f $1/megatron_patches/__main__.py && -d $1/src/parakit/launch ]]; }}
kit=${{KIT:-$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)}}
if [[ -z ${{KIT:-}} ]]; then
  until is_kit "$kit" || [[ $kit == / ]]; do kit=$(dirname "$kit"); done
  is_kit "$kit" || kit={kit}
fi
if ! is_kit "$kit"; then
  echo "The kit is not in $kit (any more); name its folder: KIT=/path/to/kit $0" >&2
  exit 2
fi
cd "$kit"
"""
"""Shell code that finds the kit's folder; `{kit}` is where the kit is now."""


_ATTEMPT_FILES = (
    records.STATUS_FILE,
    records.SAMPLES_FILE,
    records.LEDGER_FOLDER,
    records.STACKS_FOLDER,
    records.COMMUNICATION_FILE,
    records.MEMORY_FILE,
    records.TIME_FILE,
    records.TRACE_FILE,
    records.ROUTING_FILE,
    records.NODES_FOLDER,
)
"""Files and folders that each attempt writes anew. Log, events and checkpoints are continued instead."""


def _write_first_status(folder: Path, record: records.RunRecord) -> None:
    """Reserve room for the final status, and write the record and the status of a run that has not ended."""
    reserve_room(folder)
    records.write_run(folder, record)
    status = records.StatusRecord(records.Status.INCOMPLETE, None, "The launcher did not finish.")
    write_record(folder / records.STATUS_FILE, status)


@contextmanager
def _name_refused_path(folder: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into a LaunchError that names the file and what to do."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{error.filename or folder} cannot be written ({error.strerror}); free some room, or "
            "name another folder with RUNS=."
        ) from error


def _make_folder(launch: Launch, runs: Path) -> Path:
    """Make and return a new folder in `runs`, named by time, strategy, model and devices."""
    suffix = f"{launch.spec.name}-{launch.model.name}-{launch.devices}{launch.spec.device}"
    while True:
        folder = runs / f"{records.utc_stamp()}-{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            # Names contain the second, and the same run was started in this one.
            time.sleep(0.2)


def _find_software(launch: Launch, runs: Path) -> tuple[dict[str, str], str | None]:
    """Return the versions of the software that trains, and the image that contains it; None outside of images."""
    container = launch.runtime.container
    if container is None:
        return installed_versions(), image_tag()
    digest = container.image_id() or "unknown"
    software = read_image_versions(container, runs / IMAGES_FOLDER / f"{digest}.json")
    return software, f"{container.image}@{digest}"


def find_host(launch: Launch) -> records.HostRecord:
    """Return the record of the machines that a launch trains on, with their devices and links."""
    nodes, num_local_ranks = launch.nodes, launch.local_devices
    gpus: tuple[Gpu, ...] = ()
    if launch.spec.device is DeviceKind.CPU:
        local_devices = (processor_name(),) * num_local_ranks
    elif launch.spec.shares_gpu:
        gpus = visible_gpus()[:1]
        local_devices = tuple(gpu.name for gpu in gpus) * num_local_ranks
    else:
        gpus = visible_gpus()[:num_local_ranks]
        local_devices = tuple(gpu.name for gpu in gpus)
    links = find_links(gpus)
    return records.HostRecord(
        name=platform.node(),
        cpu=processor_name(),
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        # Node 0 has checked that all nodes have the same GPUs.
        devices=local_devices * (nodes.count if nodes else 1),
        driver=driver_version(),
        interconnect=describe_links(links) or _describe_gloo_path(launch),
        links=links,
        nodes=nodes.hosts if nodes else (),
    )


def _describe_gloo_path(launch: Launch) -> str | None:
    """Return the connection over which several CPU ranks communicate; None for GPUs or a single rank."""
    if launch.spec.device is not DeviceKind.CPU or launch.devices == 1:
        return None
    if launch.nodes is not None:
        return f"gloo over {launch.nodes.count} nodes, which connect at {launch.nodes.address}"
    if launch.spec.link_bits_per_second:
        return f"gloo over a link shaped to {bit_rate(launch.spec.link_bits_per_second)}"
    return "gloo over loopback"
