"""Write files and folders atomically, lock files, and hash files.

All files that other processes read are written with this module: run records, measurements, data sets, reports.
It does not import torch.
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

_ERRORS_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of flock if the file system has no locks: Lustre without `-o flock`, NFS without lock manager."""


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def atomic_write(path: Path, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes the file `path` when the block ends.

    If the block raises, the file stays as it was. If several processes write at once, on one host or
    several, the file has the full content of the last writer.

    Args:
        path: The final name.
        durable: True flushes the content and the name to the disk at the end of the block.

    Raises:
        OSError: The file cannot be written; an existing file is unchanged.
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
    """Yield an empty folder that is renamed to `path` when the block ends.

    If the block raises, the folder is removed. If earlier processes of this machine were killed while they
    wrote the same `path`, their partial folders are removed first.

    Args:
        path: The final name.
        durable: True flushes names to the disk at the end of the block. The block itself must flush the content
            of its files.

    Raises:
        OSError: The folder cannot be written, or another process has made `path` meanwhile.
    """
    prefix = f".{path.name}.{platform.node()}-"
    for partial in path.parent.glob(f"{prefix}*.partial"):
        process_id = partial.name.removeprefix(prefix).removesuffix(".partial")
        if process_id.isdigit() and not Path(f"/proc/{process_id}").exists():
            shutil.rmtree(partial, ignore_errors=True)
    partial = path.with_name(f"{prefix}{os.getpid()}.partial")
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
    """Write a file atomically (see `atomic_write`). Text is encoded as UTF-8."""
    with atomic_write(path, durable) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def write_record(path: Path, record: object, durable: bool = False) -> None:
    """Write a record (a dataclass, a dict) atomically as indented JSON."""
    write_atomically(
        path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n", durable
    )


def flush_to_disk(stream: IO[bytes]) -> None:
    """Flush the content of an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def flush_folder_to_disk(folder: Path) -> None:
    """Flush the names in a folder to the disk. Before, a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: IO[bytes], shared: bool = False) -> None:
    """Lock an open file until it is closed or the process ends, without waiting.

    On a file system without locks nothing is locked. On NFS an exclusive lock needs a file open for writing.

    Args:
        file: The file.
        shared: True takes a lock that several processes can hold together. False takes an exclusive lock.

    Raises:
        BlockingIOError: Another process holds a lock that excludes this one.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _ERRORS_WITHOUT_LOCKS:
            raise
