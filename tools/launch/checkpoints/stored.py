"""The checkpoints of a run: which there are, which can be trusted, which may go."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.launch.checkpoints.readable import (
    DamagedCheckpointError,
    KeepGoing,
    ReadingStoppedError,
    is_finished,
    prove_readable,
)
from tools.records.io import write_record

MANIFEST_FILE = "manifest.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Megatron writes the newest iteration here once a checkpoint is whole."""

_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class StoredFile:
    """What a file of a checkpoint was when it was proven readable."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` in a checkpoint: it was read back once, and these were its files."""

    iteration: int
    files: Mapping[str, StoredFile]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, which need not be whole."""

    iteration: int
    path: Path

    @property
    def is_finished(self) -> bool:
        """Whether writing it came to its end."""
        return is_finished(self.path)

    @property
    def is_proven(self) -> bool:
        """Whether it was read back after it was written."""
        return (self.path / MANIFEST_FILE).is_file()


def find_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """The checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return ()
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    found = [Checkpoint(int(match[1]), path) for match, path in named if match]
    return tuple(sorted(found, key=lambda checkpoint: -checkpoint.iteration))


def finished_iteration(folder: Path) -> int | None:
    """The newest iteration that Megatron says it has saved."""
    try:
        return int((folder / TRACKER_FILE).read_text())
    except (OSError, ValueError):
        return None


def announced(folder: Path) -> int | None:
    """When Megatron last said that it has saved, in ns; it may save the same iteration again."""
    try:
        return (folder / TRACKER_FILE).stat().st_mtime_ns
    except OSError:
        return None


def prove(checkpoint: Checkpoint, keep_going: KeepGoing = lambda: True) -> None:
    """Read a checkpoint back, and write down what its files are.

    Raises:
        DamagedCheckpointError: It cannot be read.
        OSError: The manifest cannot be written.
        ReadingStoppedError: `keep_going` says no.
    """
    prove_readable(checkpoint.path, keep_going)
    files = {}
    for path in _files(checkpoint):
        if not keep_going():
            raise ReadingStoppedError
        files[path.name] = _describe(path)
    write_record(checkpoint.path / MANIFEST_FILE, Manifest(checkpoint.iteration, files))


def check(checkpoint: Checkpoint) -> None:
    """See that a checkpoint is what it was when it was proven; prove it now if it never was.

    Raises:
        DamagedCheckpointError: It is not whole, and which file is not.
        OSError: It was not proven, and its manifest cannot be written.
    """
    if not checkpoint.is_proven:
        prove(checkpoint)
        return
    for name, known in _read_manifest(checkpoint).files.items():
        path = checkpoint.path / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{name} is missing")
        size = path.stat().st_size
        if size != known.size_bytes:
            raise DamagedCheckpointError(
                f"{name} has {size} bytes, and had {known.size_bytes} when it was saved"
            )
        if _describe(path) != known:
            raise DamagedCheckpointError(f"{name} is not what was saved: its sha256 differs")


def prune(checkpoints: Sequence[Checkpoint], keep: int) -> tuple[Checkpoint, ...]:
    """Remove what is older than the `keep` newest proven checkpoints; return what was removed."""
    proven = [checkpoint for checkpoint in checkpoints if checkpoint.is_proven]
    if len(proven) < keep:
        return ()
    oldest = min(checkpoint.iteration for checkpoint in proven[:keep])
    removed = tuple(c for c in checkpoints if c.iteration < oldest)
    for checkpoint in removed:
        # Without its manifest first: what is cut short here must not look proven.
        (checkpoint.path / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint.path)
    return removed


def _read_manifest(checkpoint: Checkpoint) -> Manifest:
    try:
        data = (checkpoint.path / MANIFEST_FILE).read_bytes()
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} cannot be read ({error})") from error


def _files(checkpoint: Checkpoint) -> list[Path]:
    return sorted(p for p in checkpoint.path.iterdir() if p.is_file() and p.name != MANIFEST_FILE)


def _describe(path: Path) -> StoredFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(file.tell(), digest)
