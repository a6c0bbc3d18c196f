"""Read and verify Megatron's distributed checkpoints (torch_dist).

`.metadata` has the file and the bytes of each piece of each tensor. A piece is a zip archive that `torch.save` wrote,
with checksums. If all pieces can be read back, the checkpoint is intact. `.metadata` is a pickle, which is read with
stand-ins for torch's classes: nothing that it names is imported or executed. Only reading values needs torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from parakit.artifacts.pickles import (
    DescribedTensor,
    InertUnpickler,
    describe_saved,
    find_foreign_function,
    read_values,
)
from parakit.config.files import open_regular_file, read_regular_file

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
FORMAT = "metadata.json"
"""File that is written last, after `.metadata`. Without it Megatron takes the checkpoint for torch's format."""

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""File to which Megatron writes the newest iteration when its checkpoint is complete."""

EMBEDDING, OUTPUT = VOCABULARY = "embedding.word_embeddings.weight", "output_layer.weight"
"""Tensors with one row per entry of the vocabulary, which Megatron pads."""
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names of norms in these checkpoints, and in the checkpoints of Megatron's local modules."""

_MOST_OPEN_ARCHIVES = 32
"""Largest number of archives that a `PieceReader` keeps open, well below the usual limit of 1,024 open files."""

Shape = tuple[int, ...]

ShouldContinue = Callable[[], bool]
"""Function that is called between the pieces of a long reading. If the function returns False, the reading stops."""


class DamagedCheckpointError(ValueError):
    """Error of a checkpoint that cannot be loaded; the message says why."""


class ReadingStoppedError(Exception):
    """Error of a reading that the caller stopped."""


@dataclass(frozen=True)
class StoredPart:
    """Position in a file of the bytes of one piece of a tensor, or of one object."""

    file: str
    offset_bytes: int
    length_bytes: int
    tensor: DescribedTensor | None = None
    """Description of the piece, if `torch.save` wrote further tensors into the same archive."""


@dataclass(frozen=True)
class StoredTensor:
    """A full tensor, with all layers stacked, and the pieces of it that ranks saved."""

    shape: Shape
    dtype: str
    """torch's name of the dtype, such as `bfloat16`; empty if the file does not state it."""
    sizes: dict[Shape, Shape]
    """Size of each piece, by the index of its first element in the full tensor."""
    parts: dict[Shape, StoredPart]
    """Position of each piece in the files, by the same index."""


@dataclass(frozen=True)
class StoredMetadata:
    """Content of `.metadata`: the position of everything that the checkpoint stores."""

    tensors: Mapping[str, StoredTensor]
    """Tensors by Megatron's names."""
    parts: tuple[StoredPart, ...]
    """Positions of all pieces and objects."""
    objects: Mapping[str, StoredPart]
    """Positions of objects that are no tensors, by name, such as `rng_state/shard_0.0_1.2`."""

    @property
    def parts_by_file(self) -> dict[str, list[StoredPart]]:
        """Parts by the name of their file, in the order of their offsets."""
        parts_by_file = dict[str, list[StoredPart]]()
        for part in sorted(self.parts, key=lambda part: (part.file, part.offset_bytes)):
            parts_by_file.setdefault(part.file, []).append(part)
        return parts_by_file


def read_metadata(folder: Path) -> StoredMetadata:
    """Read `.metadata` of a checkpoint (`iter_…`).

    Raises:
        DamagedCheckpointError: `.metadata` is missing or damaged.
    """
    try:
        with open_regular_file(folder / METADATA) as file:
            return _convert_metadata(InertUnpickler(file).load())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"it was not finished and has no {METADATA}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{METADATA} cannot be read ({error.strerror})") from error
    except Exception as error:  # A damaged pickle raises anything.
        raise DamagedCheckpointError(f"{METADATA} cannot be read ({error})") from error


def _convert_metadata(metadata: Any) -> StoredMetadata:
    """Return the content of torch's `Metadata`, for which `metadata` is a stand-in."""
    all_parts: list[StoredPart] = []
    objects: dict[str, StoredPart] = {}
    pieces_by_name: dict[str, dict[Shape, StoredPart]] = {}
    for index, info in metadata.storage_data.items():
        name = str(index.fqn)
        part = StoredPart(str(info.relative_path), int(info.offset), int(info.length))
        all_parts.append(part)
        # A piece of a tensor has the index of its first element. Other objects have none.
        offset = getattr(index, "offset", None)
        if isinstance(offset, tuple):
            pieces_by_name.setdefault(name, {})[offset] = part
        else:
            objects[name] = part
    tensors: dict[str, StoredTensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):  # Other entries describe objects.
            tensors[str(name)] = StoredTensor(
                shape=entry.size,
                dtype=_read_dtype(entry.properties),
                sizes={chunk.offsets: chunk.sizes for chunk in entry.chunks},
                parts=pieces_by_name.get(str(name), {}),
            )
    return StoredMetadata(tensors, tuple(all_parts), objects)


def _read_dtype(properties: Any) -> str:
    """Return the name of the dtype in a stand-in of torch's `TensorProperties`; empty if unknown."""
    # torch pickles these properties as a tuple that begins with the dtype.
    state = getattr(properties, "state", ())
    return getattr(state[0], "__name__", "") if state else ""


def describe_object(folder: Path, part: StoredPart) -> Any:
    """Return a stored object that is no tensor. Its classes are stand-ins, and tensors in it are only described.

    Raises:
        DamagedCheckpointError: The object cannot be read.
    """
    with _open_archive(folder, part) as archive:
        return describe_saved(archive)


def find_foreign_function_in(folder: Path, part: StoredPart) -> str | None:
    """Return the name of a suspicious function that loading a stored object would call; None if there is none.

    `find_foreign_function` defines which functions are suspicious.

    Raises:
        DamagedCheckpointError: The object cannot be read.
    """
    with _open_archive(folder, part) as archive:
        return find_foreign_function(archive)


def read_bytes(folder: Path, part: StoredPart) -> bytes:
    """Check a piece or an object against its checksums, and return the bytes of its archive.

    Raises:
        DamagedCheckpointError: The archive cannot be read, or a checksum is wrong.
    """
    with _open_archive(folder, part) as archive:
        _check_members(archive, part)
    with open_regular_file(folder / part.file) as file:
        file.seek(part.offset_bytes)
        return file.read(part.length_bytes)


def read_piece(folder: Path, part: StoredPart) -> Tensor:
    """Check one piece of a tensor against its checksums, and return the values. `torch.load` checks no checksums.

    `PieceReader` is faster for several pieces.

    Raises:
        DamagedCheckpointError: The piece cannot be read, or a checksum is wrong.
    """
    with PieceReader(folder) as reader:
        return reader.read_piece(part)


def _load_piece(folder: Path, part: StoredPart) -> Tensor:
    """Return a piece whose dtype only torch can read, such as one of eight bits.

    Raises:
        DamagedCheckpointError: torch finds no tensor in the piece, or finds something that could run code.
    """
    import torch

    try:
        piece: Tensor = torch.load(io.BytesIO(read_bytes(folder, part)), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError):
        # torch's own message advises to load the file without the safeguards against foreign code.
        raise DamagedCheckpointError(
            f"{folder / part.file} is damaged at byte {part.offset_bytes}: torch reads no tensor there"
        ) from None
    return piece


def is_finished(folder: Path) -> bool:
    """Return True if Megatron finished writing a checkpoint."""
    return (folder / METADATA).is_file() and (folder / FORMAT).is_file()


def read_finished_iteration(folder: Path) -> int | None:
    """Return the newest iteration that Megatron reports as saved in a folder; None if there is none."""
    try:
        return int(read_regular_file(folder / TRACKER_FILE))
    except (OSError, ValueError):
        return None


def read_tracker_time_ns(folder: Path) -> int | None:
    """Return the time at which Megatron last wrote its tracker file, in ns since 1970; None without such a file.

    Megatron writes this file after each save. The time also changes if Megatron saves the same iteration again.
    """
    try:
        return (folder / TRACKER_FILE).stat().st_mtime_ns
    except OSError:
        return None


def verify_readable(folder: Path, should_continue: ShouldContinue = lambda: True) -> None:
    """Read every piece of a checkpoint, and compare it with its checksums.

    Raises:
        DamagedCheckpointError: The checkpoint is unfinished, truncated or altered; the message names the file.
        ReadingStoppedError: `should_continue` returned False.
    """
    try:
        json.loads(read_regular_file(folder / FORMAT))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"it was not finished and has no {FORMAT}") from None
    except OSError as error:
        raise DamagedCheckpointError(f"{FORMAT} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{FORMAT} cannot be read ({error})") from error
    verify_pieces(folder, read_metadata(folder), should_continue)
    common = folder / "common.pt"
    if common.exists():
        _check_file(common, [StoredPart(common.name, 0, common.stat().st_size)], should_continue)


def verify_pieces(
    folder: Path, stored: StoredMetadata, should_continue: ShouldContinue = lambda: True
) -> None:
    """Compare each archive of a checkpoint with its checksums. The checkpoint may have any format.

    Raises:
        DamagedCheckpointError: A file is truncated or altered; the message names it.
        ReadingStoppedError: `should_continue` returned False.
    """
    for name, pieces in stored.parts_by_file.items():
        _check_file(folder / name, pieces, should_continue)


def hash_weights(folder: Path) -> str:
    """Return a hash of the names and positions of a checkpoint's tensors, and of the checksums of their values.

    A hash of the files would not serve. Files also hold arguments and paths, so two files may differ although the
    weights are the same.

    Raises:
        DamagedCheckpointError: `.metadata` or an archive cannot be read.
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(read_metadata(folder).tensors.items()):
        for offset, part in sorted(tensor.parts.items()):
            digest.update(f"{name} {offset} {_read_checksums(folder, part)}\n".encode())
    return digest.hexdigest()[:16]


def _read_checksums(folder: Path, piece: StoredPart) -> list[tuple[str, int, int]]:
    """Return name, size and checksum of each member of a piece's archive. Members with version numbers are left out."""
    checksums = []
    with _open_archive(folder, piece) as archive:
        for member in archive.infolist():
            name = member.filename.partition("/")[2]
            if name == "data.pkl" or name.startswith("data/"):
                checksums.append((name, member.file_size, member.CRC))
    return checksums


class PieceReader:
    """Reader of many pieces of one checkpoint. The archives that were read last stay open.

    In a file of torch's format all tensors of a rank are members of one archive, and a stacked tensor is read once
    per layer. The reader opens such an archive once instead of once per piece. Use the reader as a context, and only
    while nobody writes the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._archives: OrderedDict[tuple[str, int, int], _OpenArchive] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._archives:
            self._archives.popitem()[1].close()

    def read_piece(self, part: StoredPart) -> Tensor:
        """Check one piece of a tensor against its checksums, and return the values.

        Raises:
            DamagedCheckpointError: The piece cannot be read, or a checksum is wrong.
        """
        with _report_damage(self._folder / part.file, part.offset_bytes):
            archive = self._open(part)
            described = part.tensor or archive.describe_saved()
            if isinstance(described, DescribedTensor) and described.dtype:
                return read_values(archive.archive, described)
        return _load_piece(self._folder, part)

    def read_tensor(
        self, stored: StoredTensor, layer: int | None = None, rows: int | None = None
    ) -> Tensor:
        """Return a tensor, joined from the pieces that ranks saved.

        Args:
            stored: The tensor in the checkpoint's metadata.
            layer: Index of the layer to return of a stacked tensor, from 0; None for all layers.
            rows: Number of first rows to return; None for all rows.
        """
        begin, size = [0] * len(stored.shape), list(stored.shape)
        row_dimension = 0
        if layer is not None:
            # The first dimension of a stacked tensor is the layer.
            begin[0], size[0] = layer, 1
            row_dimension = 1
        if rows is not None:
            size[row_dimension] = rows
        box = self.read_box(stored, begin, size)
        return box if layer is None else box[0]

    def read_box(self, stored: StoredTensor, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return the part of a tensor with shape `size` whose first element has the index `begin`.

        Only one piece is in memory at a time, besides the result.
        """
        import torch

        box = torch.empty(tuple(size), dtype=getattr(torch, stored.dtype))
        for piece_begin, piece_size in stored.sizes.items():
            # Range of indices in which piece and box overlap, per dimension of the full tensor.
            overlap: list[tuple[int, int]] = []
            bounds = zip(piece_begin, piece_size, begin, size, strict=True)
            for piece_first, piece_length, box_first, box_length in bounds:
                first = max(piece_first, box_first)
                end = min(piece_first + piece_length, box_first + box_length)
                if first >= end:
                    break
                overlap.append((first, end))
            else:
                piece = self.read_piece(stored.parts[piece_begin]).reshape(tuple(piece_size))
                box[_make_slices(overlap, begin)] = piece[_make_slices(overlap, piece_begin)]
        return box

    def _open(self, part: StoredPart) -> _OpenArchive:
        """Return the open archive of a piece, and close the archive that was read longest ago if there are too many."""
        key = (part.file, part.offset_bytes, part.length_bytes)
        if key in self._archives:
            self._archives.move_to_end(key)
            return self._archives[key]
        archive = self._archives[key] = _OpenArchive(self._folder / part.file, part)
        if len(self._archives) > _MOST_OPEN_ARCHIVES:
            self._archives.popitem(last=False)[1].close()
        return archive


class _OpenArchive:
    """An open file, and the archive of one of its pieces. A damaged archive raises any error (`_report_damage`)."""

    def __init__(self, path: Path, part: StoredPart) -> None:
        self._file = open_regular_file(path)
        try:
            self.archive = _read_archive(self._file, part)
        except BaseException:
            self._file.close()
            raise
        self._described: Any = None

    def describe_saved(self) -> Any:
        """Return the stored object. Its tensors are only described, and its pickle is read once."""
        if self._described is None:
            self._described = describe_saved(self.archive)
        return self._described

    def close(self) -> None:
        self.archive.close()
        self._file.close()


def _make_slices(overlap: Sequence[tuple[int, int]], begin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of an overlap in a part of the full tensor that begins at `begin`."""
    return tuple(
        slice(first - offset, last - offset)
        for (first, last), offset in zip(overlap, begin, strict=True)
    )


def _check_file(path: Path, pieces: Iterable[StoredPart], should_continue: ShouldContinue) -> None:
    """Compare the pieces in one file with their checksums. Raises the errors of `verify_pieces`."""
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            for piece in pieces:
                if not should_continue():
                    raise ReadingStoppedError
                if piece.offset_bytes + piece.length_bytes > size:
                    raise DamagedCheckpointError(
                        f"{path.name} is truncated: it has {size} bytes of at least "
                        f"{piece.offset_bytes + piece.length_bytes}"
                    )
                with (
                    _report_damage(piece.file, piece.offset_bytes),
                    _read_archive(file, piece) as archive,
                ):
                    _check_members(archive, piece)
    except OSError as error:
        raise DamagedCheckpointError(f"{path.name} cannot be read ({error.strerror})") from error


def _check_members(archive: zipfile.ZipFile, piece: StoredPart) -> None:
    """Read all members of an archive, and compare them with their checksums.

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
    """Open the archive of a piece or an object in a checkpoint's folder.

    Raises:
        DamagedCheckpointError: The file cannot be read, or the archive is damaged.
    """
    path = folder / piece.file
    with (
        _report_damage(path, piece.offset_bytes),
        closing(_OpenArchive(path, piece)) as opened,
    ):
        yield opened.archive


def _read_archive(file: BinaryIO, piece: StoredPart) -> zipfile.ZipFile:
    """Return the archive of a piece in an open file. Closing the archive leaves the file open.

    A damaged archive raises any error, which `_report_damage` converts.
    """
    return zipfile.ZipFile(_FilePart(file, piece.offset_bytes, piece.length_bytes))


@contextmanager
def _report_damage(file: Path | str, offset_bytes: int) -> Iterator[None]:
    """Convert any error of reading a file at an offset to a DamagedCheckpointError that names the file.

    A damaged archive raises any error, for instance that the archive is encrypted.
    """
    try:
        yield
    except DamagedCheckpointError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(f"{file} cannot be read ({error.strerror})") from error
    except Exception as error:
        raise DamagedCheckpointError(
            f"{file} is damaged at byte {offset_bytes} ({error})"
        ) from None


class _FilePart(io.RawIOBase):
    """A part of an open file, which can be read like a separate file."""

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
        remaining = max(0, self._length - self._position)
        self._file.seek(self._offset + self._position)
        data = self._file.read(remaining if size < 0 else min(size, remaining))
        self._position += len(data)
        return data
