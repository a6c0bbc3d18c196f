"""Every byte of a data set checked: against the manifest's hashes, and by what its structure says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.preprocess.dataset.files import (
    Dataset,
    IntArray,
    open_dataset,
    read_array,
)
from tools.preprocess.dataset.manifest import Manifest
from tools.preprocess.errors import DatasetError


@dataclass(frozen=True)
class Verification:
    """What was checked and what was found."""

    dataset: Dataset | None
    """None if the two files do not even fit each other."""
    vocabulary: int | None
    """Which the token ids were checked against."""
    problems: tuple[str, ...]

    def describe(self) -> str:
        """What a data set without problems has passed."""
        assert self.dataset is not None
        how = (
            "every byte is the manifest's (sha256), and the structure is sound"
            if self.dataset.manifest
            else "the structure is sound; without a manifest, changed tokens inside the vocabulary "
            "cannot be told"
        )
        ids = (
            f"ids below {self.vocabulary:,}"
            if self.vocabulary
            else "vocabulary unknown, so ids unchecked (give --vocabulary)"
        )
        return (
            f"{how}. {self.dataset.documents:,} documents, {self.dataset.tokens:,} tokens, {ids}."
        )


def verify(prefix: Path, vocabulary: int | None = None) -> Verification:
    """Check a data set.

    Args:
        prefix: Path without suffix.
        vocabulary: Entries that token ids have to stay below; the manifest's if not given.
    """
    try:
        dataset = open_dataset(prefix)
    except DatasetError as error:
        return Verification(None, vocabulary, (str(error),))
    vocabulary = vocabulary or dataset.vocabulary
    problems = [
        *(_check_hashes(dataset, dataset.manifest) if dataset.manifest else ()),
        *_check_pointers(dataset),
        *_check_boundaries(dataset),
        *_check_tokens(dataset, vocabulary),
    ]
    if not problems:
        problems += _check_ends(dataset)
    return Verification(dataset, vocabulary, tuple(problems))


def last_tokens(dataset: Dataset) -> Iterator[IntArray]:
    """The last token of each sequence that has tokens, in order."""
    ends = _sequence_ends(dataset)
    chunk = next(ends, None)
    start = 0
    for tokens in dataset.token_chunks():
        stop = start + len(tokens)
        while chunk is not None:
            inside = int(np.searchsorted(chunk, stop, side="right"))
            yield tokens[chunk[:inside] - 1 - start]
            if inside < len(chunk):
                chunk = chunk[inside:]
                break
            chunk = next(ends, None)
        start = stop


def common_end(dataset: Dataset) -> int | None:
    """The token that every sequence ends in: the end-of-document token, if there is one at all."""
    common: int | None = None
    for tokens in last_tokens(dataset):
        if common is None and len(tokens):
            common = int(tokens[0])
        if (tokens != common).any():
            return None
    return common


def _sequence_ends(dataset: Dataset) -> Iterator[IntArray]:
    before = 0
    for lengths in dataset.lengths():
        ends = before + np.cumsum(lengths, dtype=np.int64)
        before = int(ends[-1])
        yield ends[lengths > 0]


def _check_hashes(dataset: Dataset, manifest: Manifest) -> Iterator[str]:
    with dataset.idx_path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != manifest.idx_sha256:
        yield f"{dataset.idx_path} has sha256 {found}, its manifest says {manifest.idx_sha256}."
    digest = hashlib.sha256()
    itemsize = np.dtype(manifest.dtype).itemsize
    first = 0
    for shard in manifest.shards:
        after = first + shard.tokens
        for chunk in read_array(dataset.bin_path, first * itemsize, manifest.dtype, shard.tokens):
            digest.update(chunk.data)
        if digest.hexdigest() != shard.sha256:
            yield f"{dataset.bin_path} differs from its manifest within tokens {first} to {after}."
            return
        first = after
    if digest.hexdigest() != manifest.bin_sha256:
        yield (
            f"{dataset.bin_path} has sha256 {digest.hexdigest()}, its manifest says "
            f"{manifest.bin_sha256}."
        )


def _check_pointers(dataset: Dataset) -> Iterator[str]:
    """Each sequence starts where the one before it ends."""
    itemsize = np.dtype(dataset.dtype).itemsize
    first = start = 0
    for lengths, pointers in zip(dataset.lengths(), dataset.pointers(), strict=True):
        ends = start + itemsize * np.cumsum(lengths, dtype=np.int64)
        starts = np.concatenate(([start], ends[:-1]))
        for at in _first((lengths < 0) | (pointers != starts)):
            yield (
                f"{dataset.idx_path}: sequence {first + at} has length {lengths[at]} and "
                f"byte offset {pointers[at]} where {starts[at]} is due."
            )
            return
        first, start = first + len(lengths), int(ends[-1])


def _check_boundaries(dataset: Dataset) -> Iterator[str]:
    """Document boundaries start at 0 and never go back; their end `open_dataset` has checked."""
    for first, boundaries, steps in _steps(dataset):
        wrong = steps < 0
        if first == 0:
            wrong[0] = boundaries[0] != 0
        for at in _first(wrong):
            yield (
                f"{dataset.idx_path}: document boundary {first + at} is {boundaries[at]}, "
                f"after {boundaries[at] - steps[at]}."
            )
            return


def _check_tokens(dataset: Dataset, vocabulary: int | None) -> Iterator[str]:
    """Ids lie in the vocabulary; without one, only negative ids are noticed."""
    limit = np.iinfo(dataset.dtype).max if vocabulary is None else vocabulary - 1
    first = 0
    for tokens in dataset.token_chunks():
        for at in _first((tokens < 0) | (tokens > limit)):
            yield (
                f"{dataset.bin_path}: token {first + at} is {tokens[at]}, outside the vocabulary "
                f"of {limit + 1}."
            )
            return
        first += len(tokens)


def _check_ends(dataset: Dataset) -> Iterator[str]:
    """If every sequence ends in one same token, it ends documents: each holds one sequence.

    Megatron does not notice boundaries that were altered but are still in order; this does, for
    data sets with end-of-document tokens.
    """
    common = common_end(dataset)
    if common is None or dataset.sequences < 2:
        return
    for first, _, steps in _steps(dataset):
        for at in _first(steps > 1):
            yield (
                f"{dataset.idx_path}: document {first + at - 1} holds {steps[at]} sequences, though "
                f"every sequence ends in token {common}, which ends documents."
            )
            return


def _steps(dataset: Dataset) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Document boundaries by chunks: the number of the first, they, and by how much each grows."""
    before = first = 0
    for boundaries in dataset.boundaries():
        yield first, boundaries, np.diff(boundaries, prepend=before)
        before, first = int(boundaries[-1]), first + len(boundaries)


def _first(wrong: IntArray) -> list[int]:
    """Place of the first that is wrong, if any is."""
    return [int(wrong.argmax())] if wrong.any() else []
