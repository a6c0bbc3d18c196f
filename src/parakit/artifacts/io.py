"""The kit's one atomic write, its one file lock and its one hash of a file.

For all files that other processes read: run records, ledgers, data sets, reports. No torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

_NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of flock on Lustre without `-o flock`, and on NFS without its lock manager."""


def compute_sha256(path: Path) -> str:
    """Hash of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def atomic_write(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """A stream whose content takes the name `path` when the block ends; an error leaves nothing behind.

    Of several writers at once, on one host or several, the last one's content stays, whole.

    Args:
        path: The final name.
        durable: Flush content and name to the disk before returning.

    Raises:
        OSError: It cannot be written; a file of that name is unchanged.
    """
    partial = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            if durable:
                flush_to_disk(stream)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        flush_folder_to_disk(path.parent)


@contextmanager
def atomic_directory(path: Path, durable: bool = False) -> Iterator[Path]:
    """A folder that takes the name `path` when the block ends; an error leaves nothing behind.

    What a killed process of this machine left of the same folder goes.

    Args:
        path: The final name.
        durable: Flush names to the disk before returning; the block flushes what its files hold.

    Raises:
        OSError: It cannot be written, or a folder of that name has come meanwhile.
    """
    mine = f".{path.name}.{platform.node()}-"
    for left in path.parent.glob(f"{mine}*.partial"):
        number = left.name.removeprefix(mine).removesuffix(".partial")
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            shutil.rmtree(left, ignore_errors=True)
    partial = path.with_name(f"{mine}{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        if durable:
            flush_folder_to_disk(partial)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if durable:
        flush_folder_to_disk(path.parent)


def write_atomically(path: Path, content: bytes | str, durable: bool = False) -> None:
    """Write a file whole or not at all; see `written_whole`. Text is UTF-8."""
    with atomic_write(path, durable) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def write_record(path: Path, record: object, durable: bool = False) -> None:
    """Write a record (a dataclass, a dict) as readable JSON, whole or not at all."""
    write_atomically(
        path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n", durable
    )


def flush_to_disk(stream: IO[bytes]) -> None:
    """Flush a file's content to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def flush_folder_to_disk(folder: Path) -> None:
    """Flush a folder's names to the disk: a rename is not certain before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[bytes], shared: bool = False) -> None:
    """Lock an open file without waiting, until it is closed or the process ends.

    A file system without locks locks nothing. Over NFS an exclusive lock needs a file open to write.

    Raises:
        BlockingIOError: Another process holds it.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
