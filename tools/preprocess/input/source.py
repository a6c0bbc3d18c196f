"""All inputs of a run as one stream of blocks that can be entered anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.preprocess.dataset.manifest import InputIdentity
from tools.preprocess.errors import InputError
from tools.preprocess.input.documents import (
    Documents,
    Kind,
    LineParser,
    Problem,
    Text,
    parse_rows,
    refuse_large,
)
from tools.preprocess.input.files import (
    Block,
    Blocks,
    Format,
    Slice,
    check_keys,
    expand,
    identify,
    whole_file,
)
from tools.preprocess.input.hub import PREFIX as HUB_PREFIX
from tools.preprocess.input.hub import HubInput, HubSource, open_hub
from tools.preprocess.input.lines import line_blocks, lines_before
from tools.preprocess.input.shards import InputShard, cut


@dataclass(frozen=True)
class Selection:
    """What to read."""

    inputs: tuple[str, ...]
    """Files, folders, globs; or one `hub:NAME`."""
    keys: tuple[str, ...] = ("text",)
    shard: InputShard = field(default_factory=InputShard)
    max_document_bytes: int | None = None
    hub_config: str | None = None
    hub_split: str = "train"


@dataclass(frozen=True)
class Source:
    """Slices in order, and how to read and parse them."""

    slices: tuple[Slice, ...]
    identities: tuple[InputIdentity, ...]
    keys: tuple[str, ...]
    max_document_bytes: int | None
    parser: LineParser
    hub: HubSource | None = None

    @property
    def size_bytes(self) -> int:
        """Of everything as stored; 0 if not known."""
        return sum(slice_.size_bytes for slice_ in self.slices)

    def blocks(self, first: int, offset: int) -> Iterator[tuple[int, Block]]:
        """All blocks from `offset` of slice `first` on, each with the number of its slice.

        Raises:
            InputError: A table lacks a column, or the hub fails.
        """
        for index in range(first, len(self.slices)):
            slice_ = self.slices[index]
            start = offset if index == first else slice_.start
            empty = True
            for block in self._open(slice_, start):
                empty = False
                yield index, block
            if empty and start == 0 and slice_.start == 0:
                yield index, Block(0, 0, 0, problem=Problem(Kind.EMPTY_FILE, 0))

    def parse(self, block: Block) -> Documents:
        """Documents of a block."""
        if block.problem is not None:
            lines = int(block.problem.kind is Kind.TOO_LARGE)
            return Documents(tuple([] for _ in self.keys), [], lines, (block.problem,))
        if block.columns is None:
            documents = self.parser.parse(block.data)
        else:
            documents = parse_rows(self.keys, [_values(column) for column in block.columns])
        if self.max_document_bytes is not None and block.size_bytes > self.max_document_bytes:
            return refuse_large(documents, self.max_document_bytes)
        return documents

    def lines_before(self, slice_index: int, offset: int) -> int:
        """Lines (or rows) of the whole input before an offset of a slice."""
        slice_ = self.slices[slice_index]
        if offset == 0 or slice_.format in (Format.PARQUET, Format.HUB):
            return offset
        return lines_before(slice_, offset)

    def samples(self, count: int) -> list[str]:
        """Up to `count` documents from the start of the first, the middle and the last slice."""
        places = sorted({0, len(self.slices) // 2, len(self.slices) - 1})
        found: list[str] = []
        for index in places if count and self.slices else ():
            slice_ = self.slices[index]
            block = next(self._open(slice_, slice_.start), None)
            if block is not None:
                texts = [_join(text) for column in self.parse(block).columns for text in column]
                found += texts[: -(-count // len(places))]
        return found[:count]

    def _open(self, slice_: Slice, offset: int) -> Blocks:
        if self.hub is not None:
            return self.hub.blocks(slice_, offset, self.keys)
        if slice_.format is Format.PARQUET:
            from tools.preprocess.input.tables import table_blocks  # imports pyarrow

            return table_blocks(slice_, offset, self.keys)
        return line_blocks(slice_, offset, self.max_document_bytes)


def open_source(selection: Selection) -> Source:
    """Find what `--input` names and cut it to the part asked for.

    Raises:
        InputError: Something is missing, or is not what its name says.
    """
    keys, limit = selection.keys, selection.max_document_bytes
    check_keys(keys)
    if any(name.startswith(HUB_PREFIX) for name in selection.inputs):
        hub = _open_hub(selection)
        slices: tuple[Slice, ...] = (hub.slice(selection.shard.index, selection.shard.count),)
        return Source(slices, (hub.identity(),), keys, limit, LineParser(keys), hub)
    files = expand(selection.inputs)
    identities = tuple(identify(file) for file in files)
    slices = cut([whole_file(file) for file in files], selection.shard)
    return Source(slices, identities, keys, limit, LineParser(keys))


def _open_hub(selection: Selection) -> HubSource:
    if len(selection.inputs) > 1:
        raise InputError("--input hub:NAME stands alone; run once for each and merge.")
    name = selection.inputs[0].removeprefix(HUB_PREFIX)
    return open_hub(HubInput(name, selection.hub_config, selection.hub_split))


def _values(column: object) -> list[object]:
    """Python values of an Arrow column; text that is not UTF-8 comes as bytes."""
    try:
        return column.to_pylist()  # type: ignore[attr-defined, no-any-return]
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]  # type: ignore[attr-defined]


def _value(scalar: object) -> object:
    try:
        return scalar.as_py()  # type: ignore[attr-defined]
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()  # type: ignore[attr-defined]


def _join(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(text)
