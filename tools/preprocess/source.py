"""Read all inputs of a run, or its `--shard`, as one stream of blocks that can start at any position."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

from parakit.data import HUB_PREFIX, DatasetError, InputIdentity, find_input_files
from tools.preprocess.documents import Parser, Problem, ProblemKind
from tools.preprocess.hub import Hub
from tools.preprocess.lines import Block, Format, Slice, line_blocks, next_line_start
from tools.preprocess.plain_text import SUFFIX, TextDocuments, text_blocks

_EDGE_BYTES = 1 << 20
_HEAD_BYTES = 512
"""Bytes at the start of a file that show its format."""
_MAGIC = {b"\x1f\x8b": Format.GZIP, b"\x28\xb5\x2f\xfd": Format.ZSTD, b"PAR1": Format.PARQUET}
_UNREAD_FORMATS = {
    b"PK\x03\x04": ("a zip archive", "unpack it with 'unzip {name}' and give the files in it"),
    b"PK\x05\x06": ("an empty zip archive", "fetch it again"),
    b"BZh": ("a bzip2 archive", "unpack it with 'bunzip2 --keep {name}'"),
    b"\xfd7zXZ\x00": ("an xz archive", "unpack it with 'unxz --keep {name}'"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it and give the files in it"),
    b"Rar!\x1a\x07": ("a rar archive", "unpack it and give the files in it"),
    b"%PDF-": ("a PDF", "write its text into a .txt file or JSON lines"),
    b"ARROW1": ("an Arrow file", "write it as parquet"),
    b"\xff\xfe": ("text in UTF-16", "convert it with 'iconv -f UTF-16 -t UTF-8 {name}'"),
    b"\xfe\xff": ("text in UTF-16", "convert it with 'iconv -f UTF-16 -t UTF-8 {name}'"),
}
"""Formats that are recognized by their first bytes and not read, each with what to do instead."""
_TAR_MAGIC = slice(257, 262)
"""Place of the text `ustar` in a tar archive."""
_SUFFIXES = {
    ".jsonl": Format.LINES,
    ".json": Format.LINES,
    ".gz": Format.GZIP,
    ".zst": Format.ZSTD,
    ".zstd": Format.ZSTD,
    ".parquet": Format.PARQUET,
}


@dataclass(frozen=True)
class Position:
    """Position between two blocks of the input: a slice, and a byte of its uncompressed text or a row (`offset`)."""

    slice_index: int
    offset: int
    lines: int
    """Lines (or rows) of the slice before the position."""
    final: bool = False
    """Whether the input ends here."""


START = Position(0, 0, 0)


def identify(path: Path) -> InputIdentity:
    """Return the identity of a file: name, size, time stamp, and a hash of its first and last MiB.

    Raises:
        DatasetError: The file cannot be read.
    """
    try:
        status = path.stat()
        with path.open("rb") as stream:
            digest = hashlib.sha256(stream.read(_EDGE_BYTES))
            stream.seek(max(0, status.st_size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror}); check it.") from None
    return InputIdentity(path.name, status.st_size, status.st_mtime_ns, digest.hexdigest())


def whole_file(path: Path) -> Slice:
    """Return a slice that covers a complete file. The first bytes of the file decide its format.

    A `.txt` file holds plain text unless it begins like a JSON line.

    Raises:
        DatasetError: The file's name ends like an archive or a table, and its content is neither. Or the content has a
            format that cannot be read.
    """
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    _refuse_unread_format(path, head)
    format_ = _find_format(path, head)
    promised = _SUFFIXES.get(path.suffix, Format.LINES)
    if head and format_ is Format.LINES and promised is not Format.LINES:
        raise DatasetError(
            f"{path} is no {promised} file, whatever its name says; fetch it again or rename it."
        )
    return Slice(str(path), format_, 0, None, path.stat().st_size)


def _find_format(path: Path, head: bytes) -> Format:
    """Return the format of a file by its first bytes. A file without known first bytes holds JSON lines.

    For a `.txt` file, the first bytes only decide between JSON lines and plain text.
    """
    begins_like_json = head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    if path.suffix == SUFFIX and not begins_like_json:
        return Format.TEXT
    for magic, known_format in _MAGIC.items():
        if head.startswith(magic):
            return known_format
    return Format.LINES


def _refuse_unread_format(path: Path, head: bytes) -> None:
    """Raise DatasetError if the first bytes of a file show a format that cannot be read, such as a tar archive.

    Otherwise each line of the file would be refused as a broken document.
    """
    if head[_TAR_MAGIC] == b"ustar":
        raise DatasetError(
            f"{path} is a tar archive, which is not read; unpack it with 'tar -xf {path}' and give the files "
            "in it."
        )
    for magic, (kind, advice) in _UNREAD_FORMATS.items():
        if head.startswith(magic):
            raise DatasetError(f"{path} is {kind}, which is not read; {advice.format(name=path)}.")


@dataclass(frozen=True)
class InputShard:
    """Part `index`, counted from 0, of an input that is cut into `count` parts."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> InputShard:
    """Return the shard that a text names.

    The text `i/n` names part `i` of `n`, where the first part is `0/n`. The text `slurm` names the part of this task
    in its Slurm job array.

    Raises:
        DatasetError: The text has another form, or there is no such part.
    """
    if text == "slurm":
        return _read_slurm_shard()
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise DatasetError(f"--shard {text} is not of the form i/n, such as 0/4; or give 'slurm'.")
    if int(index) >= int(count):
        raise DatasetError(
            f"--shard {text} does not exist: parts count from 0, so the last of {count} is "
            f"{max(int(count) - 1, 0)}/{count}."
        )
    return InputShard(int(index), int(count))


def _read_slurm_shard() -> InputShard:
    """Return the shard of this task of a Slurm job array. The array may start at any number.

    Raises:
        DatasetError: This process is no task of a job array.
    """
    try:
        task, first, tasks = (
            int(os.environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "COUNT")
        )
    except (KeyError, ValueError):
        raise DatasetError(
            "--shard slurm needs SLURM_ARRAY_TASK_ID, _MIN and _COUNT; submit with "
            "sbatch --array=0-7, or give i/n."
        ) from None
    return InputShard(task - first, tasks)


def cut(files: Sequence[Slice], shard: InputShard) -> tuple[Slice, ...]:
    """Return the slices of the input that belong to one shard.

    Plain files are cut at lines and parquet files at row groups. Archives are not cut.
    """
    if shard.count == 1:
        return tuple(files)
    total_bytes = sum(file.size_bytes for file in files)
    shard_start = total_bytes * shard.index // shard.count
    shard_stop = total_bytes * (shard.index + 1) // shard.count
    slices: list[Slice] = []
    file_start = 0
    for file in files:
        slices += _cut_file(file, shard_start - file_start, shard_stop - file_start)
        file_start += file.size_bytes
    return tuple(slices)


def _cut_file(file: Slice, low: int, high: int) -> list[Slice]:
    """Return the slice of a file whose lines, row groups or archive start between the bytes `low` and `high`.

    `low` and `high` are stored bytes, counted from the start of the file. The list has at most one slice. It is empty
    if nothing starts between them.
    """
    if file.format is Format.LINES and file.size_bytes:
        return _cut_at_lines(file, low, high)
    rows_per_group: list[int] = []
    if file.format is Format.PARQUET:
        from tools.preprocess.tables import row_groups  # Imports pyarrow.

        rows_per_group = row_groups(file.name)
    if rows_per_group:
        return _cut_at_row_groups(file, rows_per_group, low, high)
    # An empty file and a file that cannot be cut belong to the shard in which they start.
    is_empty_at_start = file.size_bytes == 0 and low == 0
    starts_inside = low <= 0 < high
    return [file] if starts_inside or is_empty_at_start else []


def _cut_at_lines(file: Slice, low: int, high: int) -> list[Slice]:
    """Return the slice of a plain file whose lines start between two bytes; empty without such a line."""
    path, size = Path(file.name), file.size_bytes
    start = next_line_start(path, min(max(low, 0), size))
    stop = next_line_start(path, min(max(high, 0), size))
    if start >= stop:
        return []
    return [replace(file, start=start, stop=stop, size_bytes=stop - start)]


def _cut_at_row_groups(
    file: Slice, rows_per_group: Sequence[int], low: int, high: int
) -> list[Slice]:
    """Return the slice of a parquet file whose row groups start between two bytes; empty without such a group.

    The file's bytes are taken as evenly distributed over its rows.
    """
    first_rows = [0, *accumulate(rows_per_group)]
    num_rows = max(first_rows[-1], 1)
    groups_inside = []
    for group in range(len(rows_per_group)):
        start_byte = file.size_bytes * first_rows[group] // num_rows
        if low <= start_byte < high:
            groups_inside.append(group)
    if not groups_inside:
        return []
    start, stop = first_rows[groups_inside[0]], first_rows[groups_inside[-1] + 1]
    size_bytes = file.size_bytes * (stop - start) // num_rows
    return [replace(file, start=start, stop=stop, size_bytes=size_bytes)]


@dataclass(frozen=True)
class PreprocessOptions:
    """Options of a preprocessing run. `cli.py` has their defaults."""

    inputs: tuple[str, ...]
    """Files, folders, globs; or one `hub:NAME`."""
    output_prefix: Path
    keys: tuple[str, ...]
    shard: InputShard
    max_document_bytes: int | None
    hub_config: str | None
    hub_split: str
    tokenizer: str
    append_eod: bool
    text_documents: TextDocuments
    """Stretch of a `.txt` file that is one document."""
    on_error: Literal["stop", "skip"]
    cross_check: int
    """Number of documents that two tokenizers encode before the run, to be compared."""
    part_bytes: int
    """Bytes of input per part."""
    threads: int
    """Number of threads; 0 is one per core that this process may use."""
    restart: bool
    overwrite: bool


@dataclass(frozen=True)
class InputStream:
    """Input of a run: slices of the input files in order. They can be read from any position."""

    slices: tuple[Slice, ...]
    identities: tuple[InputIdentity, ...]
    keys: tuple[str, ...]
    max_document_bytes: int | None
    hub: Hub | None = None
    text_documents: TextDocuments = TextDocuments.FILE

    @property
    def has_plain_text(self) -> bool:
        """True if a slice is plain text."""
        return any(slice_.format is Format.TEXT for slice_ in self.slices)

    @property
    def size_bytes(self) -> int:
        """Stored bytes of all slices; 0 if unknown."""
        return sum(slice_.size_bytes for slice_ in self.slices)

    def blocks(self, start: Position) -> Iterator[Block]:
        """Yield all blocks of the input from a position on. For an empty file, a block describes the problem."""
        bytes_before = sum(slice_.size_bytes for slice_ in self.slices[: start.slice_index])
        for index in range(start.slice_index, len(self.slices)):
            slice_ = self.slices[index]
            offset = slice_.start
            if index == start.slice_index:
                offset = max(offset, start.offset)
            has_blocks = False
            for block in self._open(slice_, offset):
                has_blocks = True
                read_bytes = bytes_before + block.read_bytes
                yield replace(block, slice_index=index, read_bytes=read_bytes)
            if not has_blocks and offset == 0:
                yield Block(0, 0, bytes_before, Problem(ProblemKind.EMPTY_FILE), index)
            bytes_before += slice_.size_bytes

    def samples(self, count: int, parser: Parser) -> list[str]:
        """Return up to `count` documents, taken from the starts of the first, the middle and the last slice.

        Only the first block of a slice is read. The list is empty if there are no slices.
        """
        if not count or not self.slices:
            return []
        indices = sorted({0, len(self.slices) // 2, len(self.slices) - 1})
        samples_per_slice = math.ceil(count / len(indices))
        samples: list[str] = []
        for index in indices:
            samples += self._read_first_documents(self.slices[index], parser)[:samples_per_slice]
        return samples[:count]

    def _read_first_documents(self, slice_: Slice, parser: Parser) -> list[str]:
        """Return the texts of all keys in the first block of a slice, with the sentences of a text joined."""
        block = next(self._open(slice_, slice_.start), None)
        if block is None:
            return []
        documents: list[str] = []
        for row in parser.parse(block.content):
            if isinstance(row, Problem):
                continue
            for text in row:
                documents.append(text if isinstance(text, str) else "\n".join(text))
        return documents

    def _open(self, slice_: Slice, offset: int) -> Iterator[Block]:
        """Return the blocks of a slice from byte or row `offset` on, by the reader of the slice's format."""
        if self.hub is not None:
            return self.hub.blocks(offset, self.keys)
        if slice_.format is Format.PARQUET:
            from tools.preprocess.tables import table_blocks  # Imports pyarrow.

            return table_blocks(slice_, offset, self.keys)
        if slice_.format is Format.TEXT:
            return text_blocks(slice_, offset, self.keys[0], self.text_documents)
        return line_blocks(slice_, offset, self.max_document_bytes)


def open_source(options: PreprocessOptions) -> InputStream:
    """Find the inputs that `--input` names, and return the part of them that `--shard` asks for.

    Raises:
        DatasetError: A key cannot be part of a file's name, the inputs cannot be combined, or an input cannot be read.
    """
    _check_keys(options.keys)
    if any(name.startswith(HUB_PREFIX) for name in options.inputs):
        return _open_hub(options)
    files = find_input_files(options.inputs)
    identities = tuple(identify(file) for file in files)
    slices = [whole_file(file) for file in files]
    for slice_ in slices:
        if slice_.format is Format.TEXT and len(options.keys) > 1:
            raise DatasetError(
                f"{slice_.name} is plain text, which has no keys; leave --json-keys out, or give JSON lines."
            )
    return InputStream(
        cut(slices, options.shard),
        identities,
        keys=options.keys,
        max_document_bytes=options.max_document_bytes,
        text_documents=options.text_documents,
    )


def _check_keys(keys: Sequence[str]) -> None:
    """Raise DatasetError if a key cannot be part of a file's name, or is given twice."""
    for key in keys:
        is_file_name = key and "/" not in key and "\0" not in key
        if not is_file_name or keys.count(key) > 1:
            raise DatasetError(
                f"--json-keys '{key}' cannot name a data set: keys become part of the file's "
                "name, so each must be given once, without slashes."
            )


def _open_hub(options: PreprocessOptions) -> InputStream:
    """Return the stream of the data set on the hub that `--input` names.

    Raises:
        DatasetError: There is a second input, or `--shard` asks for a part.
    """
    first, *further = options.inputs
    if further:
        raise DatasetError("--input hub:NAME stands alone; run once for each and merge.")
    if options.shard.count > 1:
        raise DatasetError(
            f"--input {first} is not cut by --shard; download it and give its files with --input."
        )
    hub = Hub(first.removeprefix(HUB_PREFIX), options.hub_config, options.hub_split)
    rows = Slice(hub.label, Format.HUB, start=0, stop=None, size_bytes=0)
    return InputStream(
        (rows,),
        (hub.identity(),),
        keys=options.keys,
        max_document_bytes=options.max_document_bytes,
        hub=hub,
    )
