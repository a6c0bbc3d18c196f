"""All inputs of a run, or its `--shard`, as one stream of blocks that can be entered anywhere."""

from __future__ import annotations

import hashlib
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

_EDGE_BYTES = 1 << 20
_MAGIC = {b"\x1f\x8b": Format.GZIP, b"\x28\xb5\x2f\xfd": Format.ZSTD, b"PAR1": Format.PARQUET}
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
    """A place between two blocks: byte (of the uncompressed text) or row `offset` of a slice."""

    slice_index: int
    offset: int
    lines: int
    """Lines (or rows) of the slice before it."""
    final: bool = False
    """Whether the input ends here."""


START = Position(0, 0, 0)


def identify(path: Path) -> InputIdentity:
    """Identity of a file: size, time stamp and a hash over its edges."""
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
    """All of one file, its format by the first bytes: names lie."""
    with path.open("rb") as stream:
        head = stream.read(4)
    found = next((known for magic, known in _MAGIC.items() if head.startswith(magic)), Format.LINES)
    promised = _SUFFIXES.get(path.suffix, Format.LINES)
    if head and found is Format.LINES is not promised:
        raise DatasetError(
            f"{path} is no {promised} file, whatever its name says; fetch it again or rename it."
        )
    return Slice(str(path), found, 0, None, path.stat().st_size)


@dataclass(frozen=True)
class InputShard:
    """One of `count` parts; `index` counts from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> InputShard:
    """Parse `i/n`, or `slurm`: the task of a job array."""
    if text == "slurm":
        names = (f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "COUNT"))
        try:
            task, first, tasks = (int(os.environ[name]) for name in names)
        except (KeyError, ValueError):
            raise DatasetError(
                "--shard slurm needs SLURM_ARRAY_TASK_ID, _MIN and _COUNT; submit with "
                "sbatch --array=0-7, or give i/n."
            ) from None
        return InputShard(task - first, tasks)
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise DatasetError(f"--shard {text} is not of the form i/n, such as 0/4; or give 'slurm'.")
    if int(index) >= int(count):
        raise DatasetError(
            f"--shard {text} does not exist: parts count from 0, so the last of {count} is "
            f"{max(int(count) - 1, 0)}/{count}."
        )
    return InputShard(int(index), int(count))


def cut(files: Sequence[Slice], shard: InputShard) -> tuple[Slice, ...]:
    """Slices of one part: plain files cut at lines, parquet at row groups, archives not at all."""
    if shard.count == 1:
        return tuple(files)
    total = sum(file.size_bytes for file in files)
    low, high = total * shard.index // shard.count, total * (shard.index + 1) // shard.count
    slices: list[Slice] = []
    for file in files:
        slices += _cut_file(file, low, high)
        low, high = low - file.size_bytes, high - file.size_bytes
    return tuple(slices)


def _cut_file(file: Slice, low: int, high: int) -> Iterator[Slice]:
    """What of a file lies in a window of stored bytes, counted from the file's start."""
    size = file.size_bytes
    if file.format is Format.LINES and size:
        start, stop = (next_line_start(Path(file.name), min(max(x, 0), size)) for x in (low, high))
        if start < stop:
            yield replace(file, start=start, stop=stop, size_bytes=stop - start)
        return
    groups: list[int] = []
    if file.format is Format.PARQUET:
        from tools.preprocess.tables import row_groups  # imports pyarrow

        groups = row_groups(file.name)
    if not groups:
        if low <= 0 < high or (size == 0 and low == 0):
            yield file
        return
    starts = [0, *accumulate(groups)]
    rows = max(starts[-1], 1)
    inside = [n for n, at in enumerate(starts[:-1]) if low <= size * at // rows < high]
    if inside:
        start, stop = starts[inside[0]], starts[inside[-1] + 1]
        yield replace(file, start=start, stop=stop, size_bytes=size * (stop - start) // rows)


@dataclass(frozen=True)
class PreprocessOptions:
    """Flags of a run; `cli` has their defaults."""

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
    on_error: Literal["stop", "skip"]
    cross_check: int
    """Documents encoded by two tokenizers before the run."""
    part_bytes: int
    """Input between two commits."""
    threads: int
    """0 is every core this process may use."""
    restart: bool
    overwrite: bool


@dataclass(frozen=True)
class InputStream:
    """Slices in order, and how to read them."""

    slices: tuple[Slice, ...]
    identities: tuple[InputIdentity, ...]
    keys: tuple[str, ...]
    max_document_bytes: int | None
    hub: Hub | None = None

    @property
    def size_bytes(self) -> int:
        """Of everything as stored; 0 if not known."""
        return sum(slice_.size_bytes for slice_ in self.slices)

    def blocks(self, start: Position) -> Iterator[Block]:
        """All blocks from a position on."""
        before = sum(slice_.size_bytes for slice_ in self.slices[: start.slice_index])
        for index in range(start.slice_index, len(self.slices)):
            slice_ = self.slices[index]
            offset = max(slice_.start, start.offset if index == start.slice_index else 0)
            empty = True
            for block in self._open(slice_, offset):
                empty = False
                yield replace(block, slice_index=index, read_bytes=before + block.read_bytes)
            if empty and offset == 0 and slice_.start == 0:
                yield Block(0, 0, before, Problem(ProblemKind.EMPTY_FILE), index)
            before += slice_.size_bytes

    def samples(self, count: int, parser: Parser) -> list[str]:
        """Up to `count` documents from the start of the first, the middle and the last slice."""
        places = sorted({0, len(self.slices) // 2, len(self.slices) - 1})
        found: list[str] = []
        for slice_ in [self.slices[place] for place in places] if count and self.slices else ():
            block = next(self._open(slice_, slice_.start), None)
            rows = parser.parse(block.content) if block else []
            texts = [text for row in rows if not isinstance(row, Problem) for text in row]
            joined = [text if isinstance(text, str) else "\n".join(text) for text in texts]
            found += joined[: -(-count // len(places))]
        return found[:count]

    def _open(self, slice_: Slice, offset: int) -> Iterator[Block]:
        if self.hub is not None:
            return self.hub.blocks(offset, self.keys)
        if slice_.format is Format.PARQUET:
            from tools.preprocess.tables import table_blocks  # imports pyarrow

            return table_blocks(slice_, offset, self.keys)
        return line_blocks(slice_, offset, self.max_document_bytes)


def open_source(options: PreprocessOptions) -> InputStream:
    """Find what `--input` names and cut it to the part asked for."""
    keys, limit = options.keys, options.max_document_bytes
    for key in keys:
        if not key or "/" in key or "\0" in key or keys.count(key) > 1:
            raise DatasetError(
                f"--json-keys '{key}' cannot name a data set: keys become part of the file's "
                "name, so each must be given once, without slashes."
            )
    first, *others = options.inputs
    if any(name.startswith(HUB_PREFIX) for name in options.inputs):
        if others:
            raise DatasetError("--input hub:NAME stands alone; run once for each and merge.")
        if options.shard.count > 1:
            raise DatasetError(
                f"--input {first} is not cut by --shard; download it and give its files with --input."
            )
        hub = Hub(first.removeprefix(HUB_PREFIX), options.hub_config, options.hub_split)
        rows = Slice(hub.label, Format.HUB, 0, None, 0)
        return InputStream((rows,), (hub.identity(),), keys, limit, hub)
    files = find_input_files(options.inputs)
    identities = tuple(identify(file) for file in files)
    slices = cut([whole_file(file) for file in files], options.shard)
    return InputStream(slices, identities, keys, limit)
