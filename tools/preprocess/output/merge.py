"""`merge`: data sets joined in the order given, parts of one input or separate inputs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tools.preprocess.dataset.files import Dataset, bin_path, idx_path, open_dataset
from tools.preprocess.dataset.manifest import Manifest, ShardHash, manifest_path, read_manifest
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.output.atomic_io import WHOLE, disk_errors, locked, publish, retire
from tools.preprocess.output.join import JoinedBin, Origin, seal
from tools.records.io import flush_names_to_disk

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
    manifests = [read_manifest(prefix) for prefix in prefixes]
    _check_kin(datasets, manifests, say)
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
        _join(datasets, manifests, folder)
        idx_path(output).unlink(missing_ok=True)
        manifest_path(output).unlink(missing_ok=True)
        publish(folder, {_KEY: output})
    return open_dataset(output)


def _join(datasets: Sequence[Dataset], manifests: Sequence[Manifest | None], folder: Path) -> None:
    joined_folder = folder / "joined"
    shutil.rmtree(joined_folder, ignore_errors=True)
    joined_folder.mkdir()
    shards: list[ShardHash] = []
    with JoinedBin(bin_path(joined_folder / _KEY)) as joined:
        for dataset, manifest in zip(datasets, manifests, strict=True):
            own = joined.append_file(dataset.bin_path)
            if manifest is not None and own != manifest.bin_sha256:
                raise DatasetError(
                    f"{dataset.bin_path} is damaged (its sha256 is not its manifest's); "
                    "make it again."
                )
            size = manifest.text_bytes if manifest else 0
            counts = (dataset.documents, dataset.sequences, dataset.tokens)
            shards.append(ShardHash(*counts, size, joined.sha256))
        seal(joined_folder / _KEY, joined, datasets, shards, _origin(manifests))
    flush_names_to_disk(joined_folder)
    joined_folder.rename(folder / WHOLE)
    flush_names_to_disk(folder)


def _origin(manifests: Sequence[Manifest | None]) -> Origin | None:
    """What all manifests together say; nothing if one is missing."""
    known = [manifest for manifest in manifests if manifest is not None]
    if len(known) < len(manifests):
        return None
    problems: Counter[str] = Counter()
    for manifest in known:
        problems.update(manifest.problems)
    inputs = dict.fromkeys(identity for part in known for identity in part.identity.inputs)
    first = known[0]
    return Origin(
        json_key=first.json_key,
        engine=" and ".join(dict.fromkeys(manifest.engine for manifest in known)),
        problems=problems,
        identity=replace(first.identity, inputs=tuple(inputs), part="0/1"),
    )


def _check_kin(
    datasets: Sequence[Dataset],
    manifests: Sequence[Manifest | None],
    say: Callable[[str], None],
) -> None:
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
