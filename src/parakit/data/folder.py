"""The folder `PREFIX.partial` that a run or a merge works in, and how its result gets its final name.

A kill at any moment leaves either nothing, or whole parts that the repeated command starts from, or the
finished data sets.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from parakit.artifacts.io import flush_names_to_disk, lock
from parakit.data.indexed import DatasetError, bin_path, idx_path, manifest_path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR)


def working_folder(prefix: Path) -> Path:
    """Where what becomes `prefix` is worked on."""
    return prefix.with_name(prefix.name + ".partial")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make a folder, and let nobody else work in it until the block ends or the process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("wb") as stream:
            lock(stream)
            yield
    except BlockingIOError:
        raise DatasetError(
            f"Another process is writing in {folder}; wait for it, or stop it."
        ) from None
    except OSError as error:
        if error.errno in _FULL:
            raise DatasetError(
                f"The disk is full or limited while writing {folder} ({error.strerror}); free some "
                "space and run the same command again: it resumes after the last finished part."
            ) from None
        if error.errno in _FORBIDDEN:
            raise DatasetError(
                f"{error.filename or folder} cannot be written ({error.strerror}); "
                "choose another --output-prefix."
            ) from None
        raise


def publish(folder: Path, prefixes: Mapping[str, Path]) -> None:
    """Rename the complete data sets `KEY.*` of a working folder to their names, then remove the folder.

    The `.idx` comes last: Megatron takes no data set without one.
    """
    for key, prefix in prefixes.items():
        idx_path(prefix).unlink(missing_ok=True)
        flush_names_to_disk(prefix.parent)
        move(manifest_path(folder / key), manifest_path(prefix))
        move(bin_path(folder / key), bin_path(prefix))
        flush_names_to_disk(prefix.parent)
        move(idx_path(folder / key), idx_path(prefix))
    flush_names_to_disk(folder.parent)
    retire(folder)


def move(source: Path, target: Path) -> None:
    """Rename; a manifest may be missing, and then there is none afterwards either."""
    if source.exists():
        source.replace(target)
    else:
        target.unlink(missing_ok=True)


def retire(folder: Path) -> None:
    """Remove a working folder: to others it is gone at once, whenever this process is killed."""
    retired = folder.with_name(folder.name + ".done")
    shutil.rmtree(retired, ignore_errors=True)
    if folder.exists():
        folder.rename(retired)
        flush_names_to_disk(folder.parent)
        shutil.rmtree(retired, ignore_errors=True)
