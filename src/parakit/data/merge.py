"""Join data sets into one, in order and in bounded memory.

Preprocessing joins the parts of its own run with `join`. The command `merge` joins finished data sets with
`merge_datasets`, which first checks that they belong together.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from parakit.artifacts.io import flush_to_disk
from parakit.data.folder import lock_folder, publish, working_folder
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
"""Name of the merged data set within its working folder."""


def join_datasets(datasets: Sequence[Dataset], prefix: Path, identity: RunIdentity | None) -> None:
    """Write one data set at `prefix` that holds all `datasets` in order.

    Args:
        datasets: At least one data set. All must have the same dtype.
        prefix: Path of the result without suffix. Existing files are overwritten.
        identity: Identity for the result's manifest, which sums up the manifests of `datasets`. At least one data
            set must have a manifest then. If `identity` is None, no manifest is written.

    Raises:
        DatasetError: The hash of a data set's tokens differs from its manifest.
    """
    # A killed run may have left a manifest here, which would not describe the new files.
    manifest_path(prefix).unlink(missing_ok=True)
    shards = _join_tokens(datasets, bin_path(prefix))

    def iterate_pieces() -> Iterator[DocumentIndex]:
        return (DocumentIndex(dataset.lengths, dataset.boundaries) for dataset in datasets)

    write_index(idx_path(prefix), datasets[0].dtype, iterate_pieces)
    if identity is None:
        return
    manifests = [dataset.manifest for dataset in datasets if dataset.manifest is not None]
    problems: Counter[str] = Counter()
    for manifest in manifests:
        problems.update(manifest.problems)
    engines = dict.fromkeys(manifest.engine for manifest in manifests)
    write_manifest(
        prefix,
        manifests[0].json_key,
        engine=" and ".join(engines),
        problems=problems,
        identity=identity,
        shards=shards,
    )


def _join_tokens(datasets: Sequence[Dataset], path: Path) -> list[ShardHash]:
    """Write the tokens of all data sets to one `.bin`, and return one shard per data set.

    A shard has the number of tokens and the hash of the `.bin` from its start to the shard's end.

    Raises:
        DatasetError: The hash of a data set's tokens differs from its manifest.
    """
    joined_sha256 = hashlib.sha256()
    shards: list[ShardHash] = []
    with path.open("wb") as stream:
        for dataset in datasets:
            dataset_sha256 = hashlib.sha256()
            for tokens in dataset.token_chunks():
                dataset_sha256.update(tokens)
                joined_sha256.update(tokens)
                stream.write(tokens.data)
            if dataset.bin_sha256 not in (None, dataset_sha256.hexdigest()):
                raise DatasetError(
                    f"{dataset.bin_path} is damaged (its sha256 is not its manifest's); "
                    "make it again."
                )
            text_bytes = dataset.manifest.text_bytes if dataset.manifest else 0
            shards.append(ShardHash(dataset.tokens, text_bytes, joined_sha256.hexdigest()))
        flush_to_disk(stream)
    return shards


def merge_datasets(
    prefixes: Sequence[Path], output: Path, overwrite: bool, say: Callable[[str], None]
) -> Dataset:
    """Join finished data sets in the given order, and return the new data set.

    Megatron's `tools/merge_datasets.py` writes the same `.bin` and `.idx`. The result has a manifest if all
    inputs have one.

    Args:
        prefixes: Paths of the inputs without suffix. There must be at least one.
        output: Path of the result without suffix.
        overwrite: True if a data set that exists at `output` is replaced.
        say: Function that prints a sentence. It is called if inputs lack a manifest.

    Raises:
        DatasetError: A data set is damaged, the data sets do not belong together, or `output` is one of
            the inputs or exists already.
    """
    datasets = [open_dataset(prefix) for prefix in prefixes]
    _check_compatibility(datasets, say)
    if output in prefixes:
        raise DatasetError(f"--output-prefix {output} is one of the inputs; choose another.")
    folder = working_folder(output)
    # A working folder shows that an earlier merge was killed. The `.idx` is written last, so without an
    # `.idx` the `.bin` at `output` comes from that merge and may be replaced.
    finished_files = [idx_path(output)]
    if not folder.exists():
        finished_files.append(bin_path(output))
    if not overwrite and any(path.exists() for path in finished_files):
        raise DatasetError(f"{output} exists already; choose another, or give --overwrite.")
    with lock_folder(folder):
        join_datasets(datasets, folder / _KEY, _combine_identities(datasets))
        publish(folder, {_KEY: output})
    return open_dataset(output)


def _combine_identities(datasets: Sequence[Dataset]) -> RunIdentity | None:
    """Return one identity with the inputs of all data sets; None if a data set has no manifest."""
    identities = [dataset.manifest.identity for dataset in datasets if dataset.manifest is not None]
    if len(identities) < len(datasets):
        return None
    inputs = dict.fromkeys(input_ for identity in identities for input_ in identity.inputs)
    return replace(identities[0], inputs=tuple(inputs), part="0/1")


def _check_compatibility(datasets: Sequence[Dataset], say: Callable[[str], None]) -> None:
    """Raise DatasetError if the data sets cannot be joined, as far as dtypes and manifests show.

    If a data set has no manifest, `say` is called with a sentence about what could not be checked.
    """
    _check_shared_properties(datasets)
    manifests = [dataset.manifest for dataset in datasets if dataset.manifest is not None]
    num_without = len(datasets) - len(manifests)
    if num_without:
        say(
            f"{num_without} of {len(datasets)} data sets have no manifest. So this "
            "merge cannot check that all share a tokenizer, and the result gets no manifest."
        )
        return
    parts = [manifest.identity.part for manifest in manifests]
    if set(parts) == {"0/1"}:
        return  # Each data set is of a whole input. Such data sets may come in any order.
    # The parts of one sharded input must be complete and in order.
    num_parts = int(parts[0].partition("/")[2])
    expected_parts = [f"{index}/{num_parts}" for index in range(num_parts)]
    if parts != expected_parts:
        raise DatasetError(
            f"These are parts {', '.join(parts)} of one input, but a merge needs "
            f"{', '.join(expected_parts)}; give all parts in this order."
        )


def _check_shared_properties(datasets: Sequence[Dataset]) -> None:
    """Raise DatasetError if two data sets differ in a property that joined data sets must share."""
    first_values: dict[str, tuple[object, Path]] = {}
    for dataset in datasets:
        for name, value in _shared_properties(dataset):
            first_value, first_prefix = first_values.setdefault(name, (value, dataset.prefix))
            if value != first_value:
                raise DatasetError(
                    f"{dataset.prefix} was made with {name} {value} but {first_prefix} with "
                    f"{first_value}; data sets that are to be joined need the same."
                )


def _shared_properties(dataset: Dataset) -> Iterator[tuple[str, object]]:
    """Yield pairs of name and value for the properties that joined data sets must share.

    Without a manifest only the dtype is known, and only the dtype is yielded.
    """
    yield "dtype", dataset.dtype
    manifest = dataset.manifest
    if manifest is not None:
        yield "tokenizer", manifest.identity.tokenizer_sha256
        yield "end-of-document id", manifest.identity.eod
        yield "JSON key", manifest.json_key
