"""The run folder: made before the first process starts, complete also when the run fails."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from pathlib import Path

from tools import records
from tools.launch.compose import Launch, from_root
from tools.launch.entry import kit_commit
from tools.launch.errors import LaunchError
from tools.launch.preflight import data_path
from tools.launch.provenance import Provenance, find_provenance
from tools.preprocess.dataset import open_dataset


def create_run_folder(launch: Launch, runs: Path, folder: Path | None = None) -> Path:
    """Make the folder and write everything that is known before the run: record, command, first status.

    A folder that is given was made before, such as when the run was put into a queue.

    Raises:
        LaunchError: The disk refuses it.
    """
    try:
        folder = folder or _make_folder(launch, runs)
        record = describe(launch, folder, find_provenance(launch, runs))
        records.write_record(folder / records.RUN_FILE, record)
        (folder / records.COMMAND_FILE).write_text(command_script(record))
        (folder / records.COMMAND_FILE).chmod(0o755)
        unfinished = records.StatusRecord(
            records.Status.INCOMPLETE, reason="The launcher did not finish."
        )
        records.write_record(folder / records.STATUS_FILE, unfinished)
    except OSError as error:
        raise LaunchError(
            f"{error.filename or runs} cannot be written ({error.strerror}); free some room, or name "
            "another folder with RUNS=."
        ) from error
    return folder


def describe(launch: Launch, folder: Path, provenance: Provenance) -> records.RunRecord:
    """Everything `run.json` holds."""
    where = from_root(folder)
    return records.RunRecord(
        run=folder.name,
        created_utc=utc_now(),
        backend=launch.backend,
        strategy=launch.strategy,
        model=launch.model.name,
        device=launch.device,
        parallelism=launch.parallelism,
        batch=launch.batch,
        seq_length=launch.model.shape.seq_length,
        dtype=launch.dtype,
        dropout=launch.dropout,
        seed=launch.seed,
        exit_interval=launch.iterations,
        argv=launch.arguments(where),
        command=launch.command(where),
        environment=launch.environment,
        entry=launch.entry,
        host=provenance.host,
        software=provenance.software,
        dataset=records.DatasetIdentity(launch.data, open_dataset(data_path(launch)).bin_sha256),
        start_checkpoint=launch.start_checkpoint.name if launch.start_checkpoint else None,
        kit_commit=kit_commit(),
        runtime=launch.runtime.name,
        image=provenance.image,
        link_bits_per_second=launch.network.bits_per_second if launch.network else None,
    )


def command_script(record: records.RunRecord) -> str:
    """A script that repeats the run's training as it was, from anywhere inside this kit."""
    settings = " \\\n  ".join(
        f"{name}={shlex.quote(value)}" for name, value in record.environment.items()
    )
    return (
        "#!/usr/bin/env bash\n"
        f"# Repeats {record.run}; its TensorBoard events are added to that run's folder.\n"
        "set -euo pipefail\n"
        'cd "$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)"\n'
        f"exec env \\\n  {settings} \\\n  {shlex.join(record.command)}\n"
    )


def utc_now() -> str:
    """The present time, ISO 8601, seconds, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _make_folder(launch: Launch, runs: Path) -> Path:
    while True:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        folder = (
            runs / f"{stamp}-{launch.strategy}-{launch.model.name}-{launch.devices}{launch.device}"
        )
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            time.sleep(0.2)  # The same run was started within this second; names are by the second.
            continue
        return folder
