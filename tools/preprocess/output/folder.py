"""Folders of unfinished work: locked, published by renames, removed at one stroke; full disks.

A working folder holds the folder `whole` from the moment on when nothing but renames is left to do.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tools.preprocess.dataset.files import bin_path, idx_path
from tools.preprocess.dataset.manifest import manifest_path
from tools.preprocess.errors import OutputError
from tools.records.io import flush_names_to_disk, lock

JOINED = "joined"
WHOLE = "whole"
_RETIRED = ".done"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and let nobody else work in it until the block ends or the process dies.

    Raises:
        OutputError: Another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as stream:
        try:
            lock(stream)
        except BlockingIOError:
            raise OutputError(
                f"Another process is writing in {folder}; wait for it, or stop it."
            ) from None
        yield


def fresh(folder: Path) -> Path:
    """An empty folder, whatever stood there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def complete(folder: Path) -> None:
    """Say that what is in `joined` is all: from here on only renames are left."""
    flush_names_to_disk(folder / JOINED)
    (folder / JOINED).rename(folder / WHOLE)
    flush_names_to_disk(folder)


def publish(folder: Path, prefixes: Mapping[str, Path]) -> None:
    """Rename `whole/KEY.*` to the final names (again after a kill), then remove the folder.

    The `.idx` comes last: Megatron takes no data set without one.
    """
    whole = folder / WHOLE
    for key, prefix in prefixes.items():
        if (whole / f"{key}.idx").exists():
            idx_path(prefix).unlink(missing_ok=True)
            flush_names_to_disk(prefix.parent)
        move(manifest_path(whole / key), manifest_path(prefix))
        move(bin_path(whole / key), bin_path(prefix))
        flush_names_to_disk(prefix.parent)
        move(idx_path(whole / key), idx_path(prefix))
    flush_names_to_disk(folder.parent)
    retire(folder)


def move(source: Path, target: Path) -> None:
    """Rename, unless an earlier process has done so already."""
    if source.exists():
        source.replace(target)


def retire(folder: Path) -> None:
    """Remove a working folder: to others it is gone at once, whenever this process is killed."""
    retired = folder.with_name(folder.name + _RETIRED)
    shutil.rmtree(retired, ignore_errors=True)
    if folder.exists():
        folder.rename(retired)
        flush_names_to_disk(folder.parent)
        shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """Turn a full or failing disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutputError(
                f"The disk is full or limited while writing {what} ({error.strerror}); free some "
                "space and run the same command again: it resumes after the last finished part."
            ) from None
        if error.errno in _FORBIDDEN:
            raise OutputError(
                f"{error.filename or what} cannot be written ({error.strerror}); "
                "choose another --output-prefix."
            ) from None
        raise
