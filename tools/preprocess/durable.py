"""Files that survive: flushed to the disk, renamed whole, locked against a second writer."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tools.preprocess.errors import OutputError

PIECE_BYTES = 4 << 20
"""What is held in memory while a file is copied or hashed."""


def sync(stream: BinaryIO) -> None:
    """Flush a file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk: a rename is not certain before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file under its name whole or not at all."""
    partial = path.with_name(path.name + ".new")
    with partial.open("wb") as stream:
        stream.write(content)
        sync(stream)
    partial.replace(path)
    sync_folder(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename, unless an earlier run has done so already."""
    if source.exists():
        source.replace(target)


def lock(folder: Path) -> BinaryIO:
    """Lock a folder until the returned file is closed (or the process dies).

    Raises:
        OutputError: Another process holds it.
    """
    stream = (folder / "lock").open("wb")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise OutputError(
            f"Another process is writing in {folder}; wait for it, or stop it."
        ) from None
    return stream


def pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes of a file, a few MiB at a time; fewer if it ends before."""
    while size > 0 and (piece := stream.read(min(size, PIECE_BYTES))):
        size -= len(piece)
        yield piece


@contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """Turn a full or failing disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutputError(
                f"The disk is full or limited while writing {what} ({error.strerror}); free some "
                "space and run the same command again: it goes on from the last commit."
            ) from None
        if error.errno in _FORBIDDEN:
            raise OutputError(
                f"{error.filename or what} cannot be written ({error.strerror}); "
                "choose another --output-prefix."
            ) from None
        raise


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR)
