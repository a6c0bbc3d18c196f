"""Runs that were made before: the same command, on the same kind of machine, ended well."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools import records
from tools.launch.compose import Launch
from tools.launch.paths import from_root
from tools.launch.provenance import Provenance, find_provenance


def finished_run(launch: Launch, runs: Path) -> Path | None:
    """The newest run that did exactly this, here, and ended well."""
    return next(iter(finished_runs(launch, runs)), None)


def finished_runs(launch: Launch, runs: Path) -> list[Path]:
    """All of them, newest first."""
    pattern = f"2*-{launch.strategy}-{launch.model.name}-{launch.devices}{launch.device}"
    folders = sorted(runs.glob(pattern), reverse=True)
    if not folders:
        return []
    here = find_provenance(launch, runs)
    return [folder for folder in folders if _is_same(folder, launch, here)]


def runs_anywhere(launch: Launch, runs: Path) -> list[Path]:
    """Folders of runs that train exactly this, on whatever machine, however they ended; newest first."""
    pattern = f"2*-{launch.strategy}-{launch.model.name}-{launch.devices}{launch.device}"
    return [
        folder
        for folder in sorted(runs.glob(pattern), reverse=True)
        if _asks_the_same(folder, launch)
    ]


def _asks_the_same(folder: Path, launch: Launch) -> bool:
    try:
        record = records.read_run(folder)
    except (OSError, msgspec.MsgspecError):
        return False
    return (
        record.argv == launch.arguments(from_root(folder))
        and record.backend == launch.backend
        and record.entry == launch.entry
        and (folder / records.JOB_FILE).is_file()
    )


def _is_same(folder: Path, launch: Launch, here: Provenance) -> bool:
    try:
        record, status = records.read_run(folder), records.read_status(folder)
    except (OSError, msgspec.MsgspecError):
        return False
    return (
        status.status is records.Status.OK
        # A command names its run folder.
        and record.command == launch.command(from_root(folder))
        and record.environment == launch.environment
        and record.entry == launch.entry
        and record.software == here.software
        and record.image == here.image
        and (record.host.cpu, record.host.cores) == (here.host.cpu, here.host.cores)
        and record.host.devices == here.host.devices
    )
