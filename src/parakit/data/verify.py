"""Every byte of a data set checked: against the manifest's hashes, and by what its structure says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parakit.artifacts.io import sha256_of
from parakit.data.indexed import (
    Dataset,
    DatasetError,
    IntArray,
    open_dataset,
    stretches,
)


class DatasetCheck(NamedTuple):
    """What is wrong with a data set; and if nothing is, what it has passed."""

    problems: tuple[str, ...]
    passed: str = ""


def verify_dataset(prefix: Path, vocabulary: int | None = None) -> DatasetCheck:
    """Check a data set; token ids against a vocabulary of so many entries, or the manifest's."""
    try:
        dataset = open_dataset(prefix)
    except DatasetError as error:
        return DatasetCheck((str(error),))
    vocabulary = vocabulary or dataset.vocabulary
    problems = []
    path, manifest = dataset.idx_path, dataset.manifest
    if manifest and (found := sha256_of(path)) != manifest.idx_sha256:
        problems.append(f"{path} has sha256 {found}, its manifest says {manifest.idx_sha256}.")
    problems += [*_check_pointers(dataset), *_check_tokens(dataset, vocabulary)]
    if not problems:
        problems += _check_boundaries(dataset)
    how = "every byte is the manifest's (sha256), and the structure is sound"
    if not manifest:
        lacks = "without a manifest, changed tokens inside the vocabulary cannot be told"
        how = f"the structure is sound; {lacks}"
    ids = "vocabulary unknown, so ids unchecked (give --vocabulary)"
    if vocabulary:
        ids = f"ids below {vocabulary:,}"
    counts = f"{dataset.documents:,} documents, {dataset.tokens:,} tokens"
    return DatasetCheck(tuple(problems), f"{how}. {counts}, {ids}.")


def structure_flaws(dataset: Dataset) -> list[str]:
    """Where its sequences and documents do not follow one another; no token is checked."""
    return [*_check_pointers(dataset)] or [*_check_boundaries(dataset)]


def common_end(dataset: Dataset) -> int | None:
    """The token that every sequence ends in: the end-of-document token, if there is one at all."""
    if not dataset.tokens:
        return None
    tokens, lengths, pointers = dataset.stored, dataset.lengths, dataset.pointers
    itemsize = np.dtype(dataset.dtype).itemsize
    common: int | None = None
    for part in stretches(dataset.sequences):
        ends = pointers[part] // itemsize + lengths[part]
        last = tokens[ends[lengths[part] > 0] - 1]
        if common is None and len(last):
            common = int(last[0])
        if (last != common).any():
            return None
    return common


def _check_pointers(dataset: Dataset) -> Iterator[str]:
    """Each sequence starts where the one before it ends."""
    itemsize = np.dtype(dataset.dtype).itemsize
    due = 0
    for part in stretches(dataset.sequences):
        lengths, pointers = dataset.lengths[part], dataset.pointers[part]
        ends = due + itemsize * np.cumsum(lengths, dtype=np.int64)
        starts = np.concatenate(([due], ends[:-1]))
        for at in _first((lengths < 0) | (pointers != starts)):
            yield (
                f"{dataset.idx_path}: sequence {part.start + at} has length {lengths[at]} and "
                f"byte offset {pointers[at]} where {starts[at]} is due."
            )
            return
        due = int(ends[-1])


def _check_boundaries(dataset: Dataset) -> Iterator[str]:
    """Document boundaries start at 0 and never go back; their end `open_dataset` has checked.

    If every sequence ends in one same token, it ends documents, so that each holds one sequence:
    Megatron does not notice boundaries that were altered but are still in order.
    """
    if (first := dataset.boundaries[0]) != 0:
        yield f"{dataset.idx_path}: document boundary 0 is {first}, not 0."
    end = common_end(dataset)
    most = np.inf if end is None or dataset.sequences < 2 else 1
    for part in stretches(dataset.documents):
        sequences = np.diff(dataset.boundaries[part.start : part.stop + 1])
        for at in _first((sequences < 0) | (sequences > most)):
            why = f", though every sequence ends in token {end}, which ends documents"
            yield (
                f"{dataset.idx_path}: document {part.start + at} holds {sequences[at]} "
                f"sequences{why if most == 1 else ''}."
            )
            return


def _check_tokens(dataset: Dataset, vocabulary: int | None) -> Iterator[str]:
    """Ids lie in the vocabulary, or at least are not negative; each stretch has the manifest's hash."""
    limit = np.iinfo(dataset.dtype).max if vocabulary is None else vocabulary - 1
    known: list[tuple[int, str | None]] = [(dataset.tokens, None)]
    if dataset.manifest:
        known = [(shard.tokens, shard.sha256) for shard in dataset.manifest.shards]
    digest = hashlib.sha256()
    first = 0
    with dataset.bin_path.open("rb") as stream:
        for count, sha256 in known:
            for part in stretches(count):
                tokens = np.fromfile(stream, dataset.dtype, part.stop - part.start)
                if sha256 is not None:
                    digest.update(tokens)
                for at in _first((tokens < 0) | (tokens > limit)):
                    yield (
                        f"{dataset.bin_path}: token {first + part.start + at} is {tokens[at]}, "
                        f"outside the vocabulary of {limit + 1}."
                    )
                    return
            if sha256 not in (None, digest.hexdigest()):
                last = first + count
                yield f"{dataset.bin_path} differs from its manifest within tokens {first} to {last}."
                return
            first += count


def _first(wrong: IntArray) -> list[int]:
    """Place of the first that is wrong, if any is."""
    return [int(wrong.argmax())] if wrong.any() else []
