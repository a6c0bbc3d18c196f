"""Joining data sets in order, in bounded memory: parts of one input, or separate inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tools.preprocess.dataset import Dataset, bin_path, idx_path, open_dataset
from tools.preprocess.durable import (
    PIECE_BYTES,
    disk_errors,
    lock,
    move,
    sync,
    sync_folder,
    write_whole,
)
from tools.preprocess.encoders import Say
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.index import (
    IndexHeader,
    IntArray,
    read_array,
    read_header,
    write_header,
    write_sums,
)
from tools.preprocess.manifest import (
    Manifest,
    ShardHash,
    encode_record,
    manifest_path,
    read_manifest,
)


def merge(prefixes: Sequence[Path], output: Path, overwrite: bool, say: Say) -> Dataset:
    """Join data sets in the order given; upstream's `merge_datasets.py` writes the same bytes.

    Args:
        prefixes: Paths without suffix.
        output: The joined data set's path without suffix.
        overwrite: Whether it may replace one.
        say: Told what could not be checked.

    Raises:
        DatasetError: One is damaged, or they do not belong together.
        OutputError: The output exists, or cannot be written.
    """
    datasets = [open_dataset(prefix) for prefix in prefixes]
    manifests = [read_manifest(prefix) for prefix in prefixes]
    _check_kin(datasets, manifests, say)
    if output in prefixes:
        raise OutputError(f"--output-prefix {output} is one of the inputs; choose another.")
    folder = output.with_name(output.name + ".partial")
    # A folder says that a merge was cut off; before its index is in place, the rest is its own.
    there = [idx_path(output)] if folder.exists() else [idx_path(output), bin_path(output)]
    if not overwrite and any(path.exists() for path in there):
        raise OutputError(f"{output} exists already; choose another, or give --overwrite.")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with closing(lock(folder)):
            _join(datasets, manifests, folder)
            _publish(folder, output)
    return open_dataset(output)


def _check_kin(datasets: Sequence[Dataset], manifests: Sequence[Manifest | None], say: Say) -> None:
    first = datasets[0]
    for dataset in datasets[1:]:
        if dataset.dtype != first.dtype:
            raise DatasetError(
                f"{dataset.prefix} holds {dataset.dtype} tokens but {first.prefix} {first.dtype}; "
                "make them with the same tokenizer."
            )
    known = [(d, m) for d, m in zip(datasets, manifests, strict=True) if m is not None]
    if len(known) < len(datasets):
        say(
            f"{len(datasets) - len(known)} of {len(datasets)} data sets have no manifest: that "
            "they share a tokenizer is taken on trust, and the result gets no manifest."
        )
    for dataset, manifest in known[1:]:
        _check_same(dataset, manifest, *known[0])
    if len(known) == len(datasets):
        _check_parts([manifest.identity.part for _, manifest in known])


def _check_same(dataset: Dataset, manifest: Manifest, other: Dataset, theirs: Manifest) -> None:
    for what, mine, yours in (
        ("tokenizer", manifest.identity.tokenizer_sha256, theirs.identity.tokenizer_sha256),
        ("end-of-document id", manifest.identity.eod, theirs.identity.eod),
        ("JSON key", manifest.json_key, theirs.json_key),
    ):
        if mine != yours:
            raise DatasetError(
                f"{dataset.prefix} was made with {what} {mine} but {other.prefix} with {yours}; "
                "data sets that are to be joined need the same."
            )


def _check_parts(parts: Sequence[str]) -> None:
    """Parts of one input have to be all there and in order; whole inputs come in any order."""
    count = parts[0].partition("/")[2]
    wanted = [f"{index}/{count}" for index in range(int(count))]
    if set(parts) == {"0/1"} or list(parts) == wanted:
        return
    raise DatasetError(
        f"These are parts {', '.join(parts)} where {', '.join(wanted)} are due; "
        "give all parts in order."
    )


def _join(datasets: Sequence[Dataset], manifests: Sequence[Manifest | None], folder: Path) -> None:
    with (folder / "bin").open("wb") as stream:
        total = hashlib.sha256()
        shards = [
            _copy(dataset, manifest, stream, total)
            for dataset, manifest in zip(datasets, manifests, strict=True)
        ]
        sync(stream)
    with (folder / "idx").open("wb") as stream:
        _write_index(datasets, stream)
        sync(stream)
    (folder / "manifest").unlink(missing_ok=True)
    known = [manifest for manifest in manifests if manifest is not None]
    if len(known) == len(datasets):
        with (folder / "idx").open("rb") as stream:
            index_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        manifest = _manifest(known, shards, total.hexdigest(), index_sha256)
        manifest = replace(manifest, idx_bytes=(folder / "idx").stat().st_size)
        write_whole(folder / "manifest", encode_record(manifest))
    sync_folder(folder)


def _copy(
    dataset: Dataset, manifest: Manifest | None, stream: BinaryIO, total: hashlib._Hash
) -> ShardHash:
    """Append a `.bin`, comparing its hash with its manifest's on the way."""
    own = hashlib.sha256()
    with dataset.bin_path.open("rb") as source:
        for piece in iter(lambda: source.read(PIECE_BYTES), b""):
            own.update(piece)
            total.update(piece)
            stream.write(piece)
    if manifest is not None and own.hexdigest() != manifest.bin_sha256:
        raise DatasetError(
            f"{dataset.bin_path} is damaged (its sha256 is not its manifest's); make it again."
        )
    return ShardHash(
        documents=dataset.documents,
        sequences=dataset.sequences,
        tokens=dataset.tokens,
        text_bytes=manifest.text_bytes if manifest else 0,
        sha256=total.hexdigest(),
    )


def _write_index(datasets: Sequence[Dataset], stream: BinaryIO) -> None:
    header = IndexHeader(
        dtype=datasets[0].dtype,
        sequences=sum(dataset.sequences for dataset in datasets),
        documents=sum(dataset.documents for dataset in datasets),
    )
    write_header(stream, header)
    for chunk in _lengths(datasets):
        stream.write(chunk.data)
    write_sums(stream, _lengths(datasets), np.dtype(header.dtype).itemsize)
    stream.write(np.array(0, "<i8").tobytes())
    before = 0
    for dataset in datasets:
        own = read_header(dataset.idx_path)
        # Its first boundary is the last one of the data set before it.
        for chunk in read_array(dataset.idx_path, own.boundaries_offset + 8, "<i8", own.documents):
            stream.write((before + chunk).data)
        before += dataset.sequences


def _lengths(datasets: Sequence[Dataset]) -> Iterator[IntArray]:
    for dataset in datasets:
        header = read_header(dataset.idx_path)
        yield from read_array(dataset.idx_path, header.lengths_offset, "<i4", header.sequences)


def _manifest(
    parts: Sequence[Manifest], shards: Sequence[ShardHash], bin_sha256: str, idx_sha256: str
) -> Manifest:
    first = parts[0]
    problems: dict[str, int] = {}
    for part in parts:
        for kind, count in part.problems.items():
            problems[kind] = problems.get(kind, 0) + count
    inputs = dict.fromkeys(identity for part in parts for identity in part.identity.inputs)
    engines = dict.fromkeys(part.engine for part in parts)
    return replace(
        first,
        documents=sum(part.documents for part in parts),
        sequences=sum(part.sequences for part in parts),
        tokens=sum(part.tokens for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        bin_bytes=sum(part.bin_bytes for part in parts),
        bin_sha256=bin_sha256,
        idx_sha256=idx_sha256,
        engine=" and ".join(engines),
        problems=problems,
        identity=replace(first.identity, inputs=tuple(inputs), part="0/1"),
        shards=tuple(shards),
    )


def _publish(folder: Path, output: Path) -> None:
    """Rename to the final names, the index last: without one Megatron takes nothing for whole."""
    idx_path(output).unlink(missing_ok=True)
    manifest_path(output).unlink(missing_ok=True)
    sync_folder(output.parent)
    move(folder / "manifest", manifest_path(output))
    move(folder / "bin", bin_path(output))
    sync_folder(output.parent)
    move(folder / "idx", idx_path(output))
    sync_folder(output.parent)
    (folder / "lock").unlink()
    folder.rmdir()
