"""The checkpoints in a folder: which there are, which are whole, and what their files were.

One is whole if it was read back once, piece by piece, and its files are still what they were then.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parakit.artifacts.io import compute_sha256, write_record
from parakit.artifacts.torch_dist import (
    DamagedCheckpointError,
    ReadingStoppedError,
    ShouldContinue,
    hash_weights,
    is_finished,
    verify_readable,
)
from parakit.config.errors import LaunchError
from parakit.config.files import describe_file_problem, read_regular_file

MANIFEST_FILE = "manifest.json"
DAMAGED = "damaged-"
"""Prefix of the folder of a checkpoint that was found damaged."""

_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class StoredFile:
    """What a file of a checkpoint was when it was verified readable."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """`manifest.json` in a checkpoint: it was read back once, and these were its files."""

    iteration: int
    files: Mapping[str, StoredFile]
    weights: str | None = None
    """`torch_dist.weights_hash`; None in manifests of before it was kept."""


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
    def is_verified(self) -> bool:
        """Whether it was read back after it was written."""
        return (self.path / MANIFEST_FILE).is_file()


def find_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """The checkpoints in a folder, newest first."""
    if not folder.is_dir():
        return ()
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    found = [Checkpoint(int(match[1]), path) for match, path in named if match]
    return tuple(sorted(found, key=lambda checkpoint: -checkpoint.iteration))


def verify_and_record(checkpoint: Checkpoint, keep_going: ShouldContinue = lambda: True) -> None:
    """Read a checkpoint back, and write down what its files are.

    Raises:
        DamagedCheckpointError: It cannot be read.
        OSError: The manifest cannot be written.
        ReadingStoppedError: `keep_going` says no.
    """
    verify_readable(checkpoint.path, keep_going)
    files = {}
    for path in sorted(filter(Path.is_file, checkpoint.path.iterdir())):
        if not keep_going():
            raise ReadingStoppedError
        if path.name != MANIFEST_FILE:
            files[path.name] = _describe(path)
    weights = hash_weights(checkpoint.path)
    manifest = CheckpointManifest(checkpoint.iteration, files, weights)
    write_record(checkpoint.path / MANIFEST_FILE, manifest)


def check_unchanged(checkpoint: Checkpoint) -> None:
    """See that a checkpoint is what it was when it was verified; verify it now if it never was.

    Raises:
        DamagedCheckpointError: It is not whole, and which file is not.
        OSError: It was not verified, and its manifest cannot be written.
    """
    if not checkpoint.is_verified:
        verify_and_record(checkpoint)
        return
    for name, known in _read_manifest(checkpoint).files.items():
        path = checkpoint.path / name
        if flaw := describe_file_problem(path):
            raise DamagedCheckpointError(f"{name} {flaw}")
        size = path.stat().st_size
        if size != known.size_bytes:
            raise DamagedCheckpointError(
                f"{name} has {size} bytes, and had {known.size_bytes} when it was saved"
            )
        if _describe(path) != known:
            raise DamagedCheckpointError(f"{name} is not what was saved: its sha256 differs")


def find_flaw(checkpoint: Checkpoint) -> str | None:
    """What is wrong with what was written; None if it is whole.

    Raises:
        LaunchError: The disk does not let it be checked.
    """
    try:
        check_unchanged(checkpoint)
    except DamagedCheckpointError as error:
        return str(error)
    except OSError as error:
        raise LaunchError(
            f"{checkpoint.path} cannot be checked ({error.strerror}); see to it that it can be read "
            "and that its disk has room."
        ) from error
    return None


def read_verified_weights_hash(folder: Path) -> str | None:
    """The hash of the newest checkpoint's weights in a folder, as its manifest has it; None without."""
    newest = next(iter(find_checkpoints(folder)), None)
    if newest is None or not newest.is_verified:
        return None
    try:
        return _read_manifest(newest).weights
    except DamagedCheckpointError:
        return None


def remove_old_checkpoints(checkpoints: Sequence[Checkpoint], keep: int) -> tuple[Checkpoint, ...]:
    """Remove what is older than the `keep` newest verified checkpoints; return what was removed."""
    verified = [checkpoint for checkpoint in checkpoints if checkpoint.is_verified]
    if len(verified) < keep:
        return ()
    oldest = min(checkpoint.iteration for checkpoint in verified[:keep])
    removed = tuple(c for c in checkpoints if c.iteration < oldest)
    for checkpoint in removed:
        # Without its manifest first: what is cut short here must not look verified.
        (checkpoint.path / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint.path)
    return removed


def set_aside_newer_checkpoints(folder: Path, iteration: int) -> None:
    """Move newer checkpoints out of the way of a run that resumes from `iteration`.

    Unfinished ones go, damaged ones get another name.
    """
    for checkpoint in find_checkpoints(folder):
        if checkpoint.iteration > iteration and checkpoint.is_finished:
            rename_damaged(checkpoint.path)
        elif checkpoint.iteration > iteration:
            shutil.rmtree(checkpoint.path)


def rename_damaged(path: Path) -> Path:
    """Give a checkpoint the name of a damaged one, in place of the last one of that name."""
    damaged = path.with_name(DAMAGED + path.name)
    shutil.rmtree(damaged, ignore_errors=True)
    with suppress(FileNotFoundError):  # Another run has done so meanwhile.
        path.rename(damaged)
    return damaged


def _read_manifest(checkpoint: Checkpoint) -> CheckpointManifest:
    try:
        data = read_regular_file(checkpoint.path / MANIFEST_FILE)
        return msgspec.json.decode(data, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} cannot be read ({error})") from error


def _describe(path: Path) -> StoredFile:
    return StoredFile(path.stat().st_size, compute_sha256(path))
