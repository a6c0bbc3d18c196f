"""Megatron's distributed checkpoints (torch_dist) as their files describe them; values alone need torch.

`.metadata` says which bytes of which file hold each piece of each tensor, and every piece is a zip
archive that `torch.save` wrote, with a checksum for what it holds. Reading all of them back proves that
a checkpoint is whole. `.metadata` is a pickle: it is read with stand-ins for torch's classes, so nothing
that it names is imported or run. This is its one reader: launch verifies with it, exports and the native
backend load with it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from parakit.artifacts.pickles import DescribedTensor, InertUnpickler, describe_saved, read_values
from parakit.config.files import open_regular_file, read_regular_file

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
FORMAT = "metadata.json"
"""Written last, after `.metadata`: without it Megatron takes the checkpoint for one of torch's own."""

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Megatron writes the newest iteration here once a checkpoint is whole."""

EMBEDDING, OUTPUT = VOCABULARY = "embedding.word_embeddings.weight", "output_layer.weight"
"""Tensors whose rows are the vocabulary's entries, which Megatron pads."""
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms by their names here, and those of Megatron's own (local) modules."""

Shape = tuple[int, ...]

ShouldContinue = Callable[[], bool]
"""Asked between the pieces of a long reading."""


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be loaded, and why."""


class ReadingStoppedError(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class StoredPart:
    """Bytes of a file that hold one piece of one tensor."""

    file: str
    offset_bytes: int
    length_bytes: int
    tensor: DescribedTensor | None = None
    """Which one of them, where `torch.save` wrote more than this piece."""


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, all layers stacked, and the pieces that ranks saved of it."""

    shape: Shape
    dtype: str
    """torch's name of it, `bfloat16`; empty where the file does not say it in torch's way."""
    sizes: dict[Shape, Shape]
    """Of each piece, by the place of its first element in the whole."""
    parts: dict[Shape, StoredPart]
    """By the same place."""


@dataclass(frozen=True)
class StoredMetadata:
    """What `.metadata` says is where."""

    tensors: Mapping[str, StoredTensor]
    """By Megatron's names."""
    parts: tuple[StoredPart, ...]
    """Of all that is stored, also what is no tensor."""
    objects: Mapping[str, StoredPart]
    """What is no tensor, `rng_state/shard_0.0_1.2`."""

    @property
    def by_file(self) -> dict[str, list[StoredPart]]:
        """Parts in the order in which they lie in each file."""
        found = dict[str, list[StoredPart]]()
        for part in sorted(self.parts, key=lambda part: (part.file, part.offset_bytes)):
            found.setdefault(part.file, []).append(part)
        return found


def read_metadata(folder: Path) -> StoredMetadata:
    """What a checkpoint (`iter_…`) holds.

    Raises:
        DamagedCheckpointError: `.metadata` is missing, or no metadata.
    """
    try:
        with open_regular_file(folder / METADATA) as file:
            return _described(InertUnpickler(file).load())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"it was not finished and has no {METADATA}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{METADATA} cannot be read ({error.strerror})") from error
    except Exception as error:  # A damaged pickle raises anything.
        raise DamagedCheckpointError(f"{METADATA} cannot be read ({error})") from error


def _described(found: Any) -> StoredMetadata:
    everything, objects = [], dict[str, StoredPart]()
    by_name = dict[str, dict[Shape, StoredPart]]()
    for index, at in found.storage_data.items():
        part = StoredPart(str(at.relative_path), int(at.offset), int(at.length))
        everything.append(part)
        place = getattr(index, "offset", None)
        if isinstance(place, tuple):
            by_name.setdefault(str(index.fqn), {})[place] = part
        else:
            objects[str(index.fqn)] = part
    tensors = {
        str(name): StoredTensor(
            entry.size,
            _dtype(entry.properties),
            {chunk.offsets: chunk.sizes for chunk in entry.chunks},
            by_name.get(str(name), {}),
        )
        for name, entry in found.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    return StoredMetadata(tensors, tuple(everything), objects)


def _dtype(properties: Any) -> str:
    """torch pickles its properties as a tuple that begins with the type."""
    state = getattr(properties, "state", ())
    return getattr(state[0], "__name__", "") if state else ""


def describe_object(folder: Path, part: StoredPart) -> Any:
    """Describe what is stored and is no tensor; classes are stand-ins, and tensors in it have no values.

    Raises:
        DamagedCheckpointError: It cannot be read.
    """
    with _open_archive(folder, part) as archive:
        return describe_saved(archive)


def read_bytes(folder: Path, part: StoredPart) -> bytes:
    """Read all that `torch.save` wrote of a piece or an object, and compare it with its checksums.

    Raises:
        DamagedCheckpointError: The bytes cannot be read, or are not what was saved.
    """
    with _open_archive(folder, part) as archive:
        _check_members(archive, part)
    with open_regular_file(folder / part.file) as file:
        file.seek(part.offset_bytes)
        return file.read(part.length_bytes)


def read_piece(folder: Path, part: StoredPart) -> Tensor:
    """Read one piece of a tensor, and compare it with its checksums, which `torch.load` does not.

    Raises:
        DamagedCheckpointError: The piece cannot be read, or is not what was saved.
    """
    with _open_archive(folder, part) as archive:
        described = part.tensor or describe_saved(archive)
        if isinstance(described, DescribedTensor) and described.dtype:
            return read_values(archive, described)
    return _load_piece(folder, part)


def _load_piece(folder: Path, part: StoredPart) -> Tensor:
    """Read a piece of a type that only torch knows, such as one of eight bits.

    Raises:
        DamagedCheckpointError: torch finds no tensor in it, or something that could run code.
    """
    import torch

    try:
        piece: Tensor = torch.load(io.BytesIO(read_bytes(folder, part)), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError):
        # torch's own text advises to load it without the safeguards against foreign code.
        raise DamagedCheckpointError(
            f"{folder / part.file} is damaged at byte {part.offset_bytes}: torch reads no tensor there"
        ) from None
    return piece


def is_finished(folder: Path) -> bool:
    """Whether writing a checkpoint came to its end."""
    return (folder / METADATA).is_file() and (folder / FORMAT).is_file()


def read_finished_iteration(folder: Path) -> int | None:
    """The newest iteration that Megatron says it has saved."""
    try:
        return int(read_regular_file(folder / TRACKER_FILE))
    except (OSError, ValueError):
        return None


def read_tracker_time_ns(folder: Path) -> int | None:
    """When Megatron last said that it has saved, in ns; it may save the same iteration again."""
    try:
        return (folder / TRACKER_FILE).stat().st_mtime_ns
    except OSError:
        return None


def verify_readable(folder: Path, keep_going: ShouldContinue = lambda: True) -> None:
    """Read every piece of a checkpoint back and compare it with its checksum.

    Raises:
        DamagedCheckpointError: It is unfinished, truncated or altered; names the file.
        ReadingStoppedError: `keep_going` says no.
    """
    try:
        json.loads(read_regular_file(folder / FORMAT))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"it was not finished and has no {FORMAT}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{FORMAT} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{FORMAT} cannot be read ({error})") from error
    verify_pieces(folder, read_metadata(folder), keep_going)
    common = folder / "common.pt"
    if common.exists():
        _check_file(common, [StoredPart(common.name, 0, common.stat().st_size)], keep_going)


def verify_pieces(
    folder: Path, stored: StoredMetadata, keep_going: ShouldContinue = lambda: True
) -> None:
    """Compare what each archive of a checkpoint of any format holds with its checksums.

    Raises:
        DamagedCheckpointError, ReadingStoppedError: As `verify_readable`.
    """
    for name, pieces in stored.by_file.items():
        _check_file(folder / name, pieces, keep_going)


def hash_weights(folder: Path) -> str:
    """A hash of a checkpoint's tensors: their names, places and the checksums of their values.

    The files differ each time that the same weights are written: arguments and paths are in them too.

    Raises:
        DamagedCheckpointError: `.metadata` or an archive cannot be read.
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(read_metadata(folder).tensors.items()):
        for place, part in sorted(tensor.parts.items()):
            digest.update(f"{name} {place} {_checksums(folder, part)}\n".encode())
    return digest.hexdigest()[:16]


def _checksums(folder: Path, piece: StoredPart) -> list[tuple[str, int, int]]:
    """Of what `torch.save` wrote for one piece, but for its own version numbers."""
    with _open_archive(folder, piece) as archive:
        members = ((m.filename.partition("/")[2], m.file_size, m.CRC) for m in archive.infolist())
        return [m for m in members if m[0] == "data.pkl" or m[0].startswith("data/")]


def read_tensor(
    folder: Path, stored: StoredTensor, layer: int | None = None, rows: int | None = None
) -> Tensor:
    """A tensor, put together of the pieces that ranks saved: all of it, or a layer of a stacked one,
    from 0, or so many of its first rows."""
    begin, size = [0] * len(stored.shape), list(stored.shape)
    if layer is not None:
        begin[0], size[0] = layer, 1
    if rows is not None:
        size[0 if layer is None else 1] = rows
    box = read_box(folder, stored, begin, size)
    return box if layer is None else box[0]


def read_box(
    folder: Path, stored: StoredTensor, begin: Sequence[int], size: Sequence[int]
) -> Tensor:
    """The part of a tensor that begins at `begin`; one piece beside it is in memory at a time."""
    import torch

    box = torch.empty(tuple(size), dtype=getattr(torch, stored.dtype))
    for at, extent in stored.sizes.items():
        first = [max(pair) for pair in zip(at, begin, strict=True)]
        ends = zip(at, extent, begin, size, strict=True)
        last = [min(a + e, b + s) for a, e, b, s in ends]
        if any(low >= high for low, high in zip(first, last, strict=True)):
            continue
        piece = read_piece(folder, stored.parts[at]).reshape(tuple(extent))
        into = tuple(slice(a - b, z - b) for a, z, b in zip(first, last, begin, strict=True))
        box[into] = piece[
            tuple(slice(a - b, z - b) for a, z, b in zip(first, last, at, strict=True))
        ]
    return box


def _check_file(path: Path, pieces: Iterable[StoredPart], keep_going: ShouldContinue) -> None:
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            for piece in pieces:
                if not keep_going():
                    raise ReadingStoppedError
                if piece.offset_bytes + piece.length_bytes > size:
                    raise DamagedCheckpointError(
                        f"{path.name} is truncated: it has {size} bytes of at least "
                        f"{piece.offset_bytes + piece.length_bytes}"
                    )
                with _archive(file, piece) as archive:
                    _check_members(archive, piece)
    except OSError as error:
        raise DamagedCheckpointError(f"{path.name} cannot be read ({error.strerror})") from error


def _check_members(archive: zipfile.ZipFile, piece: StoredPart) -> None:
    """Read all that an archive holds.

    Raises:
        DamagedCheckpointError: A checksum is wrong.
    """
    damaged = archive.testzip()
    if damaged is not None:
        raise DamagedCheckpointError(
            f"{piece.file} is damaged at byte {piece.offset_bytes}: the checksum of {damaged} is wrong"
        )


@contextmanager
def _open_archive(folder: Path, piece: StoredPart) -> Iterator[zipfile.ZipFile]:
    """Open what `torch.save` wrote for one piece or object.

    Raises:
        DamagedCheckpointError: The file cannot be read, or what is read of it is damaged.
    """
    path = folder / piece.file
    try:
        with (
            open_regular_file(path) as file,
            _archive(file, replace(piece, file=str(path))) as archive,
        ):
            yield archive
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read ({error.strerror})") from error


@contextmanager
def _archive(file: BinaryIO, piece: StoredPart) -> Iterator[zipfile.ZipFile]:
    """One piece, as `torch.save` wrote it."""
    try:
        with zipfile.ZipFile(_Part(file, piece.offset_bytes, piece.length_bytes)) as archive:
            yield archive
    except (OSError, DamagedCheckpointError):
        raise
    except Exception as error:  # A damaged archive raises anything, such as that it is encrypted.
        raise DamagedCheckpointError(
            f"{piece.file} is damaged at byte {piece.offset_bytes} ({error})"
        ) from None


class _Part(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        wanted = left if size < 0 else min(size, left)
        self._file.seek(self._offset + self._position)
        data = self._file.read(wanted)
        self._position += len(data)
        return data
