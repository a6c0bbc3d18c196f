"""Data sets joined in order, in bounded memory: the parts of a run, or finished ones (`merge`)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from parakit.artifacts.io import flush_to_disk
from parakit.data.folder import locked, publish, working_folder
from parakit.data.indexed import (
    Dataset,
    DatasetError,
    DocumentIndex,
    RunIdentity,
    ShardHash,
    bin_path,
    idx_path,
    manifest_path,
    open_dataset,
    write_index,
    write_manifest,
)

_KEY = "data"


def join(datasets: Sequence[Dataset], prefix: Path, identity: RunIdentity | None) -> None:
    """Write the data set at `prefix` that holds `datasets`, at least one, in order.

    Its manifest sums up theirs under `identity`; without one, none is written.

    Raises:
        DatasetError: A data set's tokens are not those of its manifest.
    """
    manifest_path(prefix).unlink(missing_ok=True)  # of a killed one
    sha256 = hashlib.sha256()
    shards: list[ShardHash] = []
    with bin_path(prefix).open("wb") as stream:
        for dataset in datasets:
            own = hashlib.sha256()
            for tokens in dataset.token_chunks():
                own.update(tokens)
                sha256.update(tokens)
                stream.write(tokens.data)
            if dataset.bin_sha256 not in (None, own.hexdigest()):
                raise DatasetError(
                    f"{dataset.bin_path} is damaged (its sha256 is not its manifest's); "
                    "make it again."
                )
            text_bytes = dataset.manifest.text_bytes if dataset.manifest else 0
            shards.append(ShardHash(dataset.tokens, text_bytes, sha256.hexdigest()))
        flush_to_disk(stream)

    def pieces() -> Iterator[DocumentIndex]:
        return (DocumentIndex(dataset.lengths, dataset.boundaries) for dataset in datasets)

    write_index(idx_path(prefix), datasets[0].dtype, pieces)
    if identity is not None:
        known = [dataset.manifest for dataset in datasets if dataset.manifest is not None]
        engine = " and ".join(dict.fromkeys(manifest.engine for manifest in known))
        problems = sum((Counter(manifest.problems) for manifest in known), Counter[str]())
        write_manifest(prefix, known[0].json_key, engine, problems, identity, shards)


def merge_datasets(
    prefixes: Sequence[Path], output: Path, overwrite: bool, say: Callable[[str], None]
) -> Dataset:
    """Join data sets in the order given; upstream's `merge_datasets.py` writes the same bytes.

    All are paths without suffix. `say` is called with what could not be checked.

    Raises:
        DatasetError: One is damaged, or they do not belong together.
    """
    datasets = [open_dataset(prefix) for prefix in prefixes]
    _check_kin(datasets, say)
    if output in prefixes:
        raise DatasetError(f"--output-prefix {output} is one of the inputs; choose another.")
    folder = working_folder(output)
    # A folder says that a merge was cut off; before its index is in place, the rest is its own.
    there = [idx_path(output)] if folder.exists() else [idx_path(output), bin_path(output)]
    if not overwrite and any(path.exists() for path in there):
        raise DatasetError(f"{output} exists already; choose another, or give --overwrite.")
    with locked(folder):
        join(datasets, folder / _KEY, _identity(datasets))
        publish(folder, {_KEY: output})
    return open_dataset(output)


def _identity(datasets: Sequence[Dataset]) -> RunIdentity | None:
    """Of all together; None if it is not known of each."""
    known = [dataset.manifest.identity for dataset in datasets if dataset.manifest is not None]
    if len(known) < len(datasets):
        return None
    inputs = dict.fromkeys(input_ for identity in known for input_ in identity.inputs)
    return replace(known[0], inputs=tuple(inputs), part="0/1")


def _check_kin(datasets: Sequence[Dataset], say: Callable[[str], None]) -> None:
    """Refuse data sets that do not belong together, as far as types and manifests say."""
    first: dict[str, tuple[object, Path]] = {}
    for dataset in datasets:
        for what, mine in _kind(dataset):
            theirs, other = first.setdefault(what, (mine, dataset.prefix))
            if mine != theirs:
                raise DatasetError(
                    f"{dataset.prefix} was made with {what} {mine} but {other} with {theirs}; data "
                    "sets that are to be joined need the same."
                )
    known = [dataset.manifest for dataset in datasets if dataset.manifest is not None]
    if len(known) < len(datasets):
        say(
            f"{len(datasets) - len(known)} of {len(datasets)} data sets have no manifest: that "
            "they share a tokenizer is taken on trust, and the result gets no manifest."
        )
        return
    # Parts of one input have to be all there and in order; whole inputs come in any order.
    parts = [manifest.identity.part for manifest in known]
    count = parts[0].partition("/")[2]
    wanted = [f"{index}/{count}" for index in range(int(count))]
    if set(parts) != {"0/1"} and parts != wanted:
        raise DatasetError(
            f"These are parts {', '.join(parts)} where {', '.join(wanted)} are due; "
            "give all parts in order."
        )


def _kind(dataset: Dataset) -> Iterator[tuple[str, object]]:
    """What joined data sets must share, as far as it is known."""
    yield "dtype", dataset.dtype
    if manifest := dataset.manifest:
        yield "tokenizer", manifest.identity.tokenizer_sha256
        yield "end-of-document id", manifest.identity.eod
        yield "JSON key", manifest.json_key
