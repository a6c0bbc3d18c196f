"""Runs that were made before and stand for those of a study (`tools.records.identity`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.launch.compose import Launch
from tools.launch.run_folder import identity_here
from tools.records import run as records
from tools.records.identity import Identity, identity_of
from tools.records.run import RunRecord


def finished_run(launch: Launch, runs: Path) -> Path | None:
    """The newest run that did exactly this, here, and ended well."""
    return next(iter(finished_runs(launch, runs)), None)


def finished_runs(launch: Launch, runs: Path) -> list[Path]:
    """All of them, newest first.

    A run that was resumed in its own folder counts if each attempt was made here and asked for the
    same: its losses are an undisturbed run's, and its times leave out the first lines after a start.
    """
    folders = folders_like(launch, runs)
    if not folders:
        return []
    wanted = identity_here(launch, runs)
    return [folder for folder in folders if _is_same(folder, wanted)]


def folders_like(launch: Launch, runs: Path) -> list[Path]:
    """Run folders of this model and number of devices, newest first, whatever their strategy's name.

    A strategy has several names (`zero1` over two ranks is `dp2-zero1`); what was trained says the
    specification in `run.json`.
    """
    pattern = f"2*-{launch.model.name}-{launch.devices}{launch.spec.device}"
    return sorted(runs.glob(pattern), reverse=True)


def attempts_of(folder: Path) -> list[RunRecord]:
    """What each attempt of a run was asked for and where, oldest first; one for a run never resumed.

    Raises:
        OSError: A record is not there.
        msgspec.DecodeError: One is not of this shape.
    """
    past = (folder / records.ATTEMPTS_FOLDER).glob("[0-9]*")
    earlier = sorted(past, key=lambda path: int(path.name))
    return [records.read_run(each) for each in (*earlier, folder)]


def trained_alike(attempts: Sequence[RunRecord]) -> bool:
    """Whether every attempt was to train what the first was: `make resume` takes ITERS= and EXTRA=."""
    return len({identity_of(attempt).computed for attempt in attempts}) == 1


def _is_same(folder: Path, wanted: Identity) -> bool:
    try:
        attempts, status = attempts_of(folder), records.read_status(folder)
    except (OSError, ValueError):  # Also of msgspec, and a folder's name that is no number.
        return False
    ended_well = status.status is records.Status.OK
    return ended_well and all(identity_of(each).stands_for(wanted) for each in attempts)
