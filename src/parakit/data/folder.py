"""Lock the working folder `PREFIX.partial` of a data set, and give the finished files their final names.

A preprocessing run or a merge writes into the working folder. `publish` renames the result and removes the folder.
The process may be killed at any moment. The disk then holds nothing, or finished parts from which the same command
resumes, or the finished data sets.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from parakit.artifacts.io import flush_folder_to_disk, lock_file
from parakit.data.indexed import DatasetError, bin_path, idx_path, manifest_path

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN_ERRORS = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR)


def working_folder(prefix: Path) -> Path:
    """Return the path of the folder in which the data set `prefix` is made: `PREFIX.partial`."""
    return prefix.with_name(prefix.name + ".partial")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it against other processes until the block ends or this process dies.

    Raises:
        DatasetError: Another process holds the lock, the disk is full, or the folder cannot be written. The last two
            errors are also raised for the code in the block.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("wb") as stream:
            lock_file(stream)
            yield
    except BlockingIOError:
        raise DatasetError(
            f"Another process is writing in {folder}; wait for it, or stop it."
        ) from None
    except OSError as error:
        if error.errno in _DISK_FULL_ERRORS:
            raise DatasetError(
                f"The disk is full or limited while writing {folder} ({error.strerror}); free some "
                "space and run the same command again: it resumes after the last finished part."
            ) from None
        if error.errno in _FORBIDDEN_ERRORS:
            raise DatasetError(
                f"{error.filename or folder} cannot be written ({error.strerror}); "
                "choose another --output-prefix."
            ) from None
        raise


def publish(folder: Path, prefixes: Mapping[str, Path]) -> None:
    """Move the complete data sets `KEY.*` of a working folder to their final prefixes, and remove the folder.

    Older files of a prefix are replaced. The `.idx` is renamed last, because Megatron takes no data set without an
    `.idx`.

    Args:
        folder: The working folder.
        prefixes: Final prefix of each KEY.
    """
    for key, prefix in prefixes.items():
        idx_path(prefix).unlink(missing_ok=True)
        flush_folder_to_disk(prefix.parent)
        move(manifest_path(folder / key), manifest_path(prefix))
        move(bin_path(folder / key), bin_path(prefix))
        flush_folder_to_disk(prefix.parent)
        move(idx_path(folder / key), idx_path(prefix))
    flush_folder_to_disk(folder.parent)
    retire(folder)


def move(source: Path, target: Path) -> None:
    """Rename a file and replace `target`; if `source` does not exist, remove `target`."""
    if source.exists():
        source.replace(target)
    else:
        target.unlink(missing_ok=True)


def retire(folder: Path) -> None:
    """Remove a working folder with its content. Nothing happens if the folder does not exist.

    The folder is renamed to `FOLDER.done` first. So if this process is killed, the next command finds
    either the whole folder or none, and never a folder that is half removed.
    """
    retired = folder.with_name(folder.name + ".done")
    shutil.rmtree(retired, ignore_errors=True)
    if folder.exists():
        folder.rename(retired)
        flush_folder_to_disk(folder.parent)
        shutil.rmtree(retired, ignore_errors=True)
