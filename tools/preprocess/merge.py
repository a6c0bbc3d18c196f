"""Data sets joined in order, in bounded memory: the parts of a run, or finished ones (`merge`)."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tools.preprocess.dataset import (
    Dataset,
    IntArray,
    Manifest,
    RunIdentity,
    ShardHash,
    bin_path,
    idx_path,
    manifest_path,
    open_dataset,
    write_index,
)
from tools.preprocess.errors import DatasetError, PreprocessError
from tools.preprocess.folder import WHOLE, locked, publish, working_folder, written_folder
from tools.records.io import flush_to_disk, write_record

_KEY = "data"


def join(datasets: Sequence[Dataset], known: Sequence[ShardHash], prefix: Path) -> list[ShardHash]:
    """Write the `.bin` and `.idx` at `prefix` that hold `datasets`, at least one, in order.

    Args:
        datasets: What to join.
        known: What each of them holds; its sha256 is that of its own tokens, empty if not known.
        prefix: Path without suffix.

    Returns:
        The same with the hashes that a manifest has: from the very start to each one's end.

    Raises:
        DatasetError: A data set's tokens are not those that its sha256 says.
    """
    so_far = hashlib.sha256()
    stretches: list[ShardHash] = []
    with bin_path(prefix).open("wb") as stream:
        for dataset, stretch in zip(datasets, known, strict=True):
            own = hashlib.sha256()
            for tokens in dataset.token_chunks():
                own.update(tokens)
                so_far.update(tokens)
                stream.write(tokens.data)
            if stretch.sha256 not in ("", own.hexdigest()):
                raise DatasetError(
                    f"{dataset.bin_path} is damaged (its sha256 is not the one recorded for it); "
                    "make it again."
                )
            stretches.append(replace(stretch, sha256=so_far.hexdigest()))
        flush_to_disk(stream)

    def lengths() -> Iterator[IntArray]:
        return (dataset.lengths for dataset in datasets)

    def boundaries() -> Iterator[IntArray]:
        before = 0
        for dataset in datasets:
            # The first boundary of each is the last one of the data set before it.
            yield before + dataset.boundaries[1:]
            before += dataset.sequences

    write_index(idx_path(prefix), datasets[0].dtype, lengths, boundaries)
    return stretches


def write_manifest(
    prefix: Path,
    shards: Sequence[ShardHash],
    json_key: str,
    engine: str,
    problems: Mapping[str, int],
    identity: RunIdentity,
) -> None:
    """Describe the `.bin` and `.idx` at `prefix`, of which `shards` are all stretches, in order."""
    dataset = open_dataset(prefix)
    with dataset.idx_path.open("rb") as stream:
        idx_sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    manifest = Manifest(
        json_key=json_key,
        documents=dataset.documents,
        sequences=dataset.sequences,
        tokens=dataset.tokens,
        dtype=dataset.dtype,
        text_bytes=sum(shard.text_bytes for shard in shards),
        bin_bytes=dataset.bin_path.stat().st_size,
        idx_bytes=dataset.idx_path.stat().st_size,
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
    """
    datasets = [open_dataset(prefix) for prefix in prefixes]
    _check_kin(datasets, say)
    if output in prefixes:
        raise PreprocessError(f"--output-prefix {output} is one of the inputs; choose another.")
    folder = working_folder(output)
    # A folder says that a merge was cut off; before its index is in place, the rest is its own.
    there = [idx_path(output)] if folder.exists() else [idx_path(output), bin_path(output)]
    if not overwrite and any(path.exists() for path in there):
        raise PreprocessError(f"{output} exists already; choose another, or give --overwrite.")
    with locked(folder):
        shutil.rmtree(folder / WHOLE, ignore_errors=True)
        with written_folder(folder / WHOLE) as whole:
            _merge(datasets, whole / _KEY)
        idx_path(output).unlink(missing_ok=True)
        manifest_path(output).unlink(missing_ok=True)
        publish(folder, {_KEY: output})
    return open_dataset(output)


def _merge(datasets: Sequence[Dataset], prefix: Path) -> None:
    known = [dataset.manifest for dataset in datasets if dataset.manifest is not None]
    shards = join(datasets, [_as_shard(dataset) for dataset in datasets], prefix)
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


def _as_shard(dataset: Dataset) -> ShardHash:
    text_bytes = dataset.manifest.text_bytes if dataset.manifest else 0
    counts = (dataset.documents, dataset.sequences, dataset.tokens, text_bytes)
    return ShardHash(*counts, dataset.bin_sha256 or "")


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
