"""Find, verify and remove the checkpoints in a folder.

A checkpoint is intact if it was once read back piece by piece, and its files have not changed since. Verifying a
checkpoint writes `manifest.json`, which has the size and hash of each file.
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
"""Prefix of the folder of a damaged checkpoint."""

_FOLDER_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class StoredFile:
    """Size and hash of a file of a checkpoint, at the time when the checkpoint was verified."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """`manifest.json` of a verified checkpoint: its files, by name, when it was verified."""

    iteration: int
    files: Mapping[str, StoredFile]
    weights: str | None = None
    """Result of `torch_dist.hash_weights`; None in manifests of older versions."""


@dataclass(frozen=True)
class Checkpoint:
    """Folder of a checkpoint, which may be unfinished or damaged."""

    iteration: int
    path: Path

    @property
    def is_finished(self) -> bool:
        """True if Megatron finished writing the checkpoint."""
        return is_finished(self.path)

    @property
    def is_verified(self) -> bool:
        """True if the checkpoint has a manifest, which is written after it was read back."""
        return (self.path / MANIFEST_FILE).is_file()


def find_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """Return the checkpoints in a folder, newest first; empty if the folder does not exist."""
    if not folder.is_dir():
        return ()
    checkpoints = []
    for path in folder.iterdir():
        match = _FOLDER_NAME.fullmatch(path.name)
        if match and path.is_dir():
            checkpoints.append(Checkpoint(int(match[1]), path))
    return tuple(sorted(checkpoints, key=lambda checkpoint: -checkpoint.iteration))


def verify_and_record(
    checkpoint: Checkpoint, should_continue: ShouldContinue = lambda: True
) -> None:
    """Read a checkpoint completely, and write its manifest into the checkpoint's folder.

    Args:
        checkpoint: The checkpoint.
        should_continue: Called between pieces and files. If it returns False, reading stops.

    Raises:
        DamagedCheckpointError: The checkpoint cannot be read.
        OSError: The manifest cannot be written.
        ReadingStoppedError: `should_continue` returned False.
    """
    verify_readable(checkpoint.path, should_continue)
    files = {}
    for path in sorted(checkpoint.path.iterdir()):
        if not path.is_file() or path.name == MANIFEST_FILE:
            continue
        if not should_continue():
            raise ReadingStoppedError
        files[path.name] = _describe_file(path)
    weights = hash_weights(checkpoint.path)
    manifest = CheckpointManifest(checkpoint.iteration, files, weights)
    write_record(checkpoint.path / MANIFEST_FILE, manifest)


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Check that the files of a checkpoint have not changed since its manifest was written.

    A checkpoint without a manifest is verified now, and a manifest is written into its folder.

    Raises:
        DamagedCheckpointError: A file is missing or changed; the message names it.
        OSError: A file cannot be read, or a new manifest cannot be written.
    """
    if not checkpoint.is_verified:
        verify_and_record(checkpoint)
        return
    for name, recorded in _read_manifest(checkpoint).files.items():
        path = checkpoint.path / name
        problem = describe_file_problem(path)
        if problem:
            raise DamagedCheckpointError(f"{name} {problem}")
        size = path.stat().st_size
        if size != recorded.size_bytes:
            raise DamagedCheckpointError(
                f"{name} has {size} bytes, and had {recorded.size_bytes} when it was saved"
            )
        if _describe_file(path) != recorded:
            raise DamagedCheckpointError(f"{name} is not what was saved: its sha256 differs")


def find_flaw(checkpoint: Checkpoint) -> str | None:
    """Return a sentence on a missing or changed file of a checkpoint; None if all files are intact.

    A checkpoint without a manifest is verified now, and a manifest is written into its folder.

    Raises:
        LaunchError: A file cannot be read, or the manifest cannot be written.
    """
    try:
        check_unchanged(checkpoint)
    except DamagedCheckpointError as error:
        return str(error)
    except OSError as error:
        raise LaunchError(
            f"{checkpoint.path} cannot be checked ({error.strerror}); make it readable, and make room on "
            "its disk."
        ) from error
    return None


def read_verified_weights_hash(folder: Path) -> str | None:
    """Return the hash of the newest checkpoint's weights from its manifest; None without a readable manifest."""
    checkpoints = find_checkpoints(folder)
    if not checkpoints:
        return None
    newest = checkpoints[0]
    if not newest.is_verified:
        return None
    try:
        return _read_manifest(newest).weights
    except DamagedCheckpointError:
        return None


def remove_old_checkpoints(checkpoints: Sequence[Checkpoint], keep: int) -> tuple[Checkpoint, ...]:
    """Remove all checkpoints that are older than the `keep` newest verified ones, and return those removed.

    Nothing is removed if there are fewer than `keep` verified checkpoints.
    """
    verified = [checkpoint for checkpoint in checkpoints if checkpoint.is_verified]
    if len(verified) < keep:
        return ()
    oldest_kept = min(checkpoint.iteration for checkpoint in verified[:keep])
    removed = tuple(checkpoint for checkpoint in checkpoints if checkpoint.iteration < oldest_kept)
    for checkpoint in removed:
        # The manifest goes first, so that a checkpoint whose removal is cut off does not look verified.
        (checkpoint.path / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint.path)
    return removed


def set_aside_newer_checkpoints(folder: Path, iteration: int) -> None:
    """Move checkpoints newer than `iteration` out of the way, because a run resumes from this iteration.

    Unfinished checkpoints are removed. Finished checkpoints are damaged, or the run would resume from them;
    they are renamed with the prefix DAMAGED.
    """
    for checkpoint in find_checkpoints(folder):
        if checkpoint.iteration <= iteration:
            continue
        if checkpoint.is_finished:
            rename_damaged(checkpoint.path)
        else:
            shutil.rmtree(checkpoint.path)


def rename_damaged(path: Path) -> Path:
    """Add the prefix DAMAGED to a checkpoint's name, and return the new path.

    An older damaged checkpoint of the same name is removed.
    """
    damaged = path.with_name(DAMAGED + path.name)
    shutil.rmtree(damaged, ignore_errors=True)
    with suppress(FileNotFoundError):  # Another run has renamed it meanwhile.
        path.rename(damaged)
    return damaged


def _read_manifest(checkpoint: Checkpoint) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: The manifest is damaged.
        OSError: The manifest cannot be read.
    """
    try:
        data = read_regular_file(checkpoint.path / MANIFEST_FILE)
        return msgspec.json.decode(data, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} cannot be read ({error})") from error


def _describe_file(path: Path) -> StoredFile:
    """Return the size and hash of a file."""
    return StoredFile(path.stat().st_size, compute_sha256(path))
