"""Data sets joined in order, in bounded memory: the parts of a run, or whole ones (`merge`)."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tools.preprocess.dataset.files import (
    Dataset,
    Index,
    IntArray,
    bin_path,
    idx_path,
    open_dataset,
    read_index,
    write_index,
)
from tools.preprocess.dataset.manifest import Manifest, RunIdentity, ShardHash, manifest_path
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.output.folder import (
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

_KEY = "data"


def join_indexes(indexes: Sequence[Index], prefix: Path) -> None:
    """Write the index at `prefix` for the tokens that `indexes`, at least one, divide in order."""

    def lengths() -> Iterator[IntArray]:
        for index in indexes:
            yield from index.lengths()

    def boundaries() -> Iterator[IntArray]:
        before = 0
        for index in indexes:
            # The first boundary of each is the last one of the index before it.
            yield from (before + chunk for chunk in index.boundaries(1))
            before += index.sequences

    sequences = sum(index.sequences for index in indexes)
    documents = sum(index.documents for index in indexes)
    joined = Index(idx_path(prefix), indexes[0].dtype, sequences, documents)
    write_index(joined, lengths, boundaries())


def write_manifest(
    prefix: Path,
    shards: Sequence[ShardHash],
    json_key: str,
    engine: str,
    problems: Mapping[str, int],
    identity: RunIdentity,
) -> None:
    """Describe the `.bin` and `.idx` at `prefix`, of which `shards` are all stretches, in order."""
    index = read_index(idx_path(prefix))
    with index.idx_path.open("rb") as stream:
        idx_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    manifest = Manifest(
        json_key=json_key,
        documents=index.documents,
        sequences=index.sequences,
        tokens=sum(shard.tokens for shard in shards),
        dtype=index.dtype,
        text_bytes=sum(shard.text_bytes for shard in shards),
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=index.size_bytes,
        bin_sha256=shards[-1].sha256,
        idx_sha256=idx_sha256,
        engine=engine,
        problems=dict(problems),
        identity=identity,
        shards=tuple(shards),
    )
    write_record(manifest_path(prefix), manifest, durable=True)


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
    so_far = hashlib.sha256()
    with bin_path(prefix).open("wb") as stream:
        for dataset in datasets:
            own = hashlib.sha256()
            for tokens in dataset.token_chunks():
                own.update(tokens.data)
                so_far.update(tokens.data)
                stream.write(tokens.data)
            if dataset.bin_sha256 not in (None, own.hexdigest()):
                raise DatasetError(
                    f"{dataset.bin_path} is damaged (its sha256 is not its manifest's); "
                    "make it again."
                )
            size = dataset.manifest.text_bytes if dataset.manifest else 0
            counts = (dataset.documents, dataset.sequences, dataset.tokens)
            shards.append(ShardHash(*counts, size, so_far.hexdigest()))
        flush_to_disk(stream)
    join_indexes(datasets, prefix)
    known = [dataset.manifest for dataset in datasets if dataset.manifest is not None]
    if len(known) == len(datasets):
        inputs = dict.fromkeys(identity for part in known for identity in part.identity.inputs)
        write_manifest(
            prefix,
            shards,
            json_key=known[0].json_key,
            engine=" and ".join(dict.fromkeys(manifest.engine for manifest in known)),
            problems=sum((Counter(manifest.problems) for manifest in known), Counter()),
            identity=replace(known[0].identity, inputs=tuple(inputs), part="0/1"),
        )


def _check_kin(datasets: Sequence[Dataset], say: Callable[[str], None]) -> None:
    """Refuse data sets that do not belong together, as far as types and manifests say."""
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
