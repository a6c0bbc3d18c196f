"""Data sets joined in order, in bounded memory: the parts of a run, or whole ones (`merge`)."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tools.preprocess.dataset.files import (
    Dataset,
    IndexHeader,
    IntArray,
    bin_path,
    idx_path,
    open_dataset,
    write_index,
)
from tools.preprocess.dataset.manifest import (
    Manifest,
    RunIdentity,
    ShardHash,
    manifest_path,
)
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.output.atomic_io import (
    JOINED,
    WHOLE,
    complete,
    disk_errors,
    fresh,
    locked,
    publish,
    retire,
)
from tools.records.io import flush_to_disk, write_record

Buffer = bytes | memoryview
_PIECE_BYTES = 4 << 20


class JoinedBin:
    """A `.bin` that grows, hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._sha256 = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of all that was appended so far."""
        return self._sha256.hexdigest()

    def append(self, data: Buffer) -> None:
        """Add some tokens."""
        self._sha256.update(data)
        self._stream.write(data)

    def append_file(self, path: Path) -> str:
        """Add another `.bin`; its own sha256."""
        own = hashlib.sha256()
        with path.open("rb") as source:
            while piece := source.read(_PIECE_BYTES):
                own.update(piece)
                self.append(piece)
        return own.hexdigest()

    def flush(self) -> None:
        """Have it on the disk."""
        flush_to_disk(self._stream)

    def close(self) -> None:
        """Leave it as it is."""
        with suppress(OSError):  # a full disk, reported already
            self._stream.close()


@dataclass(frozen=True)
class Origin:
    """What a manifest says of a data set beside counts and hashes."""

    json_key: str
    engine: str
    problems: Mapping[str, int]
    identity: RunIdentity


def seal(
    prefix: Path,
    joined: JoinedBin,
    datasets: Sequence[Dataset],
    shards: Sequence[ShardHash],
    origin: Origin | None,
) -> None:
    """Complete the joined `.bin` at `prefix` with its index and manifest, all on the disk.

    Args:
        prefix: Path without suffix.
        joined: The tokens, all of them.
        datasets: Where they came from, in order; at least one.
        shards: The same for the manifest.
        origin: Without it there is no manifest.
    """
    joined.flush()
    header = IndexHeader(
        dtype=datasets[0].dtype,
        sequences=sum(dataset.sequences for dataset in datasets),
        documents=sum(dataset.documents for dataset in datasets),
    )
    with idx_path(prefix).open("wb+") as stream:
        write_index(stream, header, lambda: _lengths(datasets), _boundaries(datasets))
        flush_to_disk(stream)
        stream.seek(0)
        index_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if origin is None:
        return
    manifest = Manifest(
        json_key=origin.json_key,
        documents=header.documents,
        sequences=header.sequences,
        tokens=sum(dataset.tokens for dataset in datasets),
        dtype=header.dtype,
        text_bytes=sum(shard.text_bytes for shard in shards),
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=header.size_bytes,
        bin_sha256=joined.sha256,
        idx_sha256=index_sha256,
        engine=origin.engine,
        problems=dict(origin.problems),
        identity=origin.identity,
        shards=tuple(shards),
    )
    write_record(manifest_path(prefix), manifest, durable=True)


def _lengths(datasets: Sequence[Dataset]) -> Iterator[IntArray]:
    for dataset in datasets:
        yield from dataset.lengths()


def _boundaries(datasets: Sequence[Dataset]) -> Iterator[IntArray]:
    """All boundaries but the first of each: that is the last one of the data set before it."""
    before = 0
    for dataset in datasets:
        skip = 1
        for chunk in dataset.boundaries():
            yield before + chunk[skip:]
            skip = 0
        before += dataset.sequences


_KEY = "data"


def merge(
    prefixes: Sequence[Path], output: Path, overwrite: bool, say: Callable[[str], None]
) -> Dataset:
    """Join data sets in the order given; upstream's `merge_datasets.py` writes the same bytes.

    Args:
        prefixes: Paths without suffix.
        output: The joined data set's path without suffix.
        overwrite: Whether it may replace one.
        say: Called with what could not be checked.

    Raises:
        DatasetError: One is damaged, or they do not belong together.
        OutputError: The output exists, or cannot be written.
    """
    datasets = [open_dataset(prefix) for prefix in prefixes]
    _check_kin(datasets, say)
    if output in prefixes:
        raise OutputError(f"--output-prefix {output} is one of the inputs; choose another.")
    folder = output.with_name(output.name + ".partial")
    whole = folder / WHOLE
    if whole.exists() and not idx_path(whole / _KEY).exists():
        retire(folder)  # killed after its last rename: the output is finished
    # A folder says that a merge was cut off; before its index is in place, the rest is its own.
    there = [idx_path(output)] if folder.exists() else [idx_path(output), bin_path(output)]
    if not overwrite and any(path.exists() for path in there):
        raise OutputError(f"{output} exists already; choose another, or give --overwrite.")
    with disk_errors(folder), locked(folder):
        shutil.rmtree(whole, ignore_errors=True)
        _join(datasets, fresh(folder / JOINED) / _KEY)
        complete(folder)
        idx_path(output).unlink(missing_ok=True)
        manifest_path(output).unlink(missing_ok=True)
        publish(folder, {_KEY: output})
    return open_dataset(output)


def _join(datasets: Sequence[Dataset], prefix: Path) -> None:
    shards: list[ShardHash] = []
    with closing(JoinedBin(bin_path(prefix))) as joined:
        for dataset in datasets:
            own = joined.append_file(dataset.bin_path)
            if dataset.manifest is not None and own != dataset.manifest.bin_sha256:
                raise DatasetError(
                    f"{dataset.bin_path} is damaged (its sha256 is not its manifest's); "
                    "make it again."
                )
            size = dataset.manifest.text_bytes if dataset.manifest else 0
            counts = (dataset.documents, dataset.sequences, dataset.tokens)
            shards.append(ShardHash(*counts, size, joined.sha256))
        seal(prefix, joined, datasets, shards, _origin(datasets))


def _origin(datasets: Sequence[Dataset]) -> Origin | None:
    """What all manifests together say; nothing if one is missing."""
    known = [dataset.manifest for dataset in datasets if dataset.manifest is not None]
    if len(known) < len(datasets):
        return None
    problems: Counter[str] = Counter()
    for manifest in known:
        problems.update(manifest.problems)
    inputs = dict.fromkeys(identity for part in known for identity in part.identity.inputs)
    return Origin(
        json_key=known[0].json_key,
        engine=" and ".join(dict.fromkeys(manifest.engine for manifest in known)),
        problems=problems,
        identity=replace(known[0].identity, inputs=tuple(inputs), part="0/1"),
    )


def _check_kin(datasets: Sequence[Dataset], say: Callable[[str], None]) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DatasetError(
                f"{dataset.prefix} holds {dataset.dtype} tokens but {first.prefix} {first.dtype}; "
                "make them with the same tokenizer."
            )
    known = [(d, d.manifest) for d in datasets if d.manifest is not None]
    for dataset, manifest in known[1:]:
        other, theirs = known[0]
        for what, mine, yours in (
            ("tokenizer", manifest.identity.tokenizer_sha256, theirs.identity.tokenizer_sha256),
            ("end-of-document id", manifest.identity.eod, theirs.identity.eod),
            ("JSON key", manifest.json_key, theirs.json_key),
        ):
            if mine != yours:
                raise DatasetError(
                    f"{dataset.prefix} was made with {what} {mine} but {other.prefix} with "
                    f"{yours}; data sets that are to be joined need the same."
                )
    if len(known) < len(datasets):
        say(
            f"{len(datasets) - len(known)} of {len(datasets)} data sets have no manifest: that "
            "they share a tokenizer is taken on trust, and the result gets no manifest."
        )
        return
    # Parts of one input have to be all there and in order; whole inputs come in any order.
    parts = [manifest.identity.part for _, manifest in known]
    count = parts[0].partition("/")[2]
    wanted = [f"{index}/{count}" for index in range(int(count))]
    if set(parts) != {"0/1"} and parts != wanted:
        raise DatasetError(
            f"These are parts {', '.join(parts)} where {', '.join(wanted)} are due; "
            "give all parts in order."
        )
