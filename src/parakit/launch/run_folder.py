"""The run folder, with machine and software of the run: made before the first process starts."""

from __future__ import annotations

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
from parakit.cluster import Nodes, image_id, image_tag, installed_versions, read_image_versions
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.run import DeviceKind
from parakit.data import open_dataset
from parakit.formatting.units import bit_rate
from parakit.launch.code import read_kit_commit
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.devices import (
    describe_links,
    driver_version,
    find_links,
    processor_name,
    visible_gpus,
)
from parakit.launch.supervise.exit_status import reserve_room

LOCK_FILE = ".lock"
IMAGES_FOLDER = ".images"
"""In the runs folder: what was found in each image, by digest, so that it is asked once."""


def create_run_folder(launch: Launch, runs: Path, folder: Path | None = None) -> Path:
    """Make the folder and write everything that is known before the run: record, command, first status.

    A folder that is given was made before, such as when the run was put into a queue. If the launch
    resumes from a checkpoint in it, what the last attempt left there is kept in `attempts/`.

    Raises:
        LaunchError: The disk refuses it.
    """
    if folder is not None and launch.resume_point and launch.resume_point.run == folder.name:
        return _reopen(folder, launch, launch.resume_point)
    with _refused_by_the_disk(runs):
        folder = folder or _make_folder(launch, runs)
        record = build_run_record(launch, folder)
        (folder / records.COMMAND_FILE).write_text(format_command_script(record))
        (folder / records.COMMAND_FILE).chmod(0o755)
        _begin(folder, record)
    return folder


def _reopen(folder: Path, launch: Launch, resume_point: ResumePoint) -> Path:
    """Make a run's folder ready for its next attempt; what the last one left goes to `attempts/`."""
    before = records.read_run(folder)
    with _refused_by_the_disk(folder):
        attempts = folder / records.ATTEMPTS_FOLDER
        past = attempts / str(1 + len(before.resumptions))
        past.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / records.RUN_FILE, past)
        for name in _OF_ONE_ATTEMPT:
            if (folder / name).exists():
                (folder / name).rename(past / name)
        set_aside_newer_checkpoints(resume_point.folder, resume_point.iteration)
        now = build_run_record(launch, folder)
        resumptions = (*before.resumptions, *now.resumptions)
        record = replace(now, created_utc=before.created_utc, resumptions=resumptions)
        _begin(folder, record)
    return folder


@contextmanager
def hold_run_folder(run: Path | None, nodes: Nodes | None) -> Iterator[None]:
    """Hold a run folder, from the choice of a checkpoint in it to the end of the attempt.

    A folder that is still to be made is not held; of several nodes the first holds it.

    Raises:
        LaunchError: It is no folder, another launcher holds it, or a rank of the run still lives.
    """
    if run is None or (nodes is not None and nodes.rank > 0):
        yield
        return
    if not run.is_dir():
        raise LaunchError(f"RUN_FOLDER={run} is no folder; make it, or leave RUN_FOLDER= out.")
    still = LaunchError(f"{run} is still running; stop it before it is resumed.")
    with (run / LOCK_FILE).open("ab") as file:
        try:
            lock_file(file)
        except BlockingIOError:
            raise still from None
        if records.is_running(run / records.LOG_FILE):
            raise still
        yield


def read_named_run(folder: Path, otherwise: str = "") -> records.RunRecord:
    """The record of the run that `RUN=` names.

    Args:
        folder: The run's.
        otherwise: What may be named in its place, the end of a sentence.

    Raises:
        LaunchError: It is no run folder, or one of another version of the kit.
    """
    try:
        return records.read_run(folder)
    except (FileNotFoundError, NotADirectoryError):
        raise LaunchError(
            f"RUN={relative_to_root(folder)} is no run folder: it has no {records.RUN_FILE}; 'ls runs' shows "
            f"them{otherwise}."
        ) from None
    except OSError as error:
        raise LaunchError(
            f"{folder / records.RUN_FILE} cannot be read ({error.strerror}); name the folder of another "
            "run, or put the file back."
        ) from None
    except msgspec.DecodeError as error:
        raise LaunchError(
            f"{folder / records.RUN_FILE} is not of this version of the kit ({error})."
        ) from None


def build_run_record(launch: Launch, folder: Path) -> records.RunRecord:
    """Everything `run.json` holds, of machine and software as they are now."""
    where, start, loaded = relative_to_root(folder), launch.initial_checkpoint, launch.resume_point
    (software, image), code = _find_software(launch, folder.parent), launch.code
    # Of a run that resumes also what trained until then, if that was not the same.
    if loaded and (before := records.read_run(folder.parent / loaded.run).code):
        code = before.joined(code)
    return records.RunRecord(
        run=folder.name,
        created_utc=records.utc_now(),
        spec=launch.spec,
        exit_interval=launch.iterations,
        argv=launch.arguments(where),
        command=launch.command(where),
        dataset=_dataset_of(launch),
        start_checkpoint=start.name if start else None,
        start_weights=read_verified_weights_hash(start) if start else None,
        environment=launch.environment,
        entry=launch.entry,
        host=find_host(launch),
        software=software,
        kit_commit=read_kit_commit(),
        code=code,
        runtime=launch.runtime.name,
        image=image,
        save_every=launch.saving.every if launch.saving else None,
        resumptions=(records.Resumption(loaded.run, loaded.iteration),) if loaded else (),
    )


def _dataset_of(launch: Launch) -> records.DatasetIdentity:
    """Return the data set's path and the hash of its present tokens."""
    return records.DatasetIdentity(launch.data, open_dataset(launch.data_path).bin_sha256)


def identify_computation(launch: Launch) -> TrainingIdentity:
    """What a launch trains, in its own folder or in any."""
    arguments = parse_flag_values(launch.arguments())
    return identify_training(
        launch.spec, arguments, launch.iterations, launch.environment, _dataset_of(launch).sha256
    )


def identify_launch(launch: Launch, runs: Path) -> Identity:
    """The identity that a run of this launch would have on this machine."""
    installed, image = _find_software(launch, runs)
    code = CodeIdentity(launch.entry, launch.code, sorted_pairs(installed), image)
    return Identity(identify_computation(launch), code, identify_host(find_host(launch)))


def record_launcher(folder: Path) -> None:
    """Write which process trains the run: this one.

    Raises:
        LaunchError: The disk refuses it.
    """
    started = psutil.Process().create_time()
    launcher = records.LauncherRecord(platform.node(), os.getpid(), started)
    with _refused_by_the_disk(folder):
        write_record(folder / records.LAUNCHER_FILE, launcher)


def format_command_script(record: records.RunRecord) -> str:
    """A script that repeats the run's training as it was, from any folder.

    The kit is looked for around the script, then where it is now; `KIT=` names it anywhere else.
    """
    settings = " \\\n  ".join(
        f"{name}={shlex.quote(value)}" for name, value in record.environment.items()
    )
    nodes = record.host.nodes
    where = f"# This is node 0's of {len(nodes)}: {', '.join(nodes)}.\n" if nodes else ""
    return (
        "#!/usr/bin/env bash\n"
        f"{where}"
        f"# Repeats {record.run}; what it writes besides its output goes to that run's folder.\n"
        "set -euo pipefail\n"
        f"{_FIND_KIT.format(kit=shlex.quote(str(ROOT)))}"
        f"exec env \\\n  {settings} \\\n  {shlex.join(record.command)}\n"
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


_OF_ONE_ATTEMPT = (
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
"""What is measured anew by each attempt; log, events and checkpoints are continued."""


def _begin(folder: Path, record: records.RunRecord) -> None:
    reserve_room(folder)
    records.write_run(folder, record)
    status = records.StatusRecord(records.Status.INCOMPLETE, None, "The launcher did not finish.")
    write_record(folder / records.STATUS_FILE, status)


@contextmanager
def _refused_by_the_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"{error.filename or folder} cannot be written ({error.strerror}); free some room, or "
            "name another folder with RUNS=."
        ) from error


def _make_folder(launch: Launch, runs: Path) -> Path:
    what = f"{launch.spec.name}-{launch.model.name}-{launch.devices}{launch.spec.device}"
    while True:
        folder = runs / f"{records.utc_stamp()}-{what}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            time.sleep(0.2)  # The same run was started within this second; names are by the second.


def _find_software(launch: Launch, runs: Path) -> tuple[dict[str, str], str | None]:
    """The versions of what is installed, and the image they are in."""
    container = launch.runtime.container
    if container is None:
        return installed_versions(), image_tag()
    digest = image_id(container.image) or "unknown"
    software = read_image_versions(container, runs / IMAGES_FOLDER / f"{digest}.json")
    return software, f"{container.image}@{digest}"


def find_host(launch: Launch) -> records.HostRecord:
    """The machines that a launch trains on, and their devices."""
    on_cpu = launch.spec.device is DeviceKind.CPU
    nodes, local = launch.nodes, launch.local_devices
    # Node 0 has seen that all have the same GPUs, or it would not have started.
    gpus = () if on_cpu else visible_gpus()[: 1 if launch.spec.shares_gpu else local]
    names = tuple(gpu.name for gpu in gpus) * (local if launch.spec.shares_gpu else 1)
    links = find_links(gpus)
    over = "loopback"
    if launch.spec.link_bits_per_second:
        over = f"a link shaped to {bit_rate(launch.spec.link_bits_per_second)}"
    if nodes is not None:
        over = f"{nodes.count} nodes, which connect at {nodes.address}"
    loopback = f"gloo over {over}" if on_cpu and launch.devices > 1 else None
    return records.HostRecord(
        name=platform.node(),
        cpu=processor_name(),
        cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        devices=((processor_name(),) * local if on_cpu else names) * (nodes.count if nodes else 1),
        driver=driver_version(),
        interconnect=describe_links(links) or loopback,
        links=links,
        nodes=nodes.hosts if nodes else (),
    )
