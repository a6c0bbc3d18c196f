"""Check every byte of a data set, against the hashes of its manifest and against the rules of the format.

`verify_dataset` returns a `DatasetCheck` with the problems. Without a manifest only the structure can be
checked: offsets, document boundaries and the range of the token ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parakit.artifacts.io import compute_sha256
from parakit.data.indexed import (
    Dataset,
    DatasetError,
    IntArray,
    iterate_chunks,
    open_dataset,
)


class DatasetCheck(NamedTuple):
    """Result of `verify_dataset`: problems, or what a sound data set was checked for."""

    problems: tuple[str, ...]
    """One sentence per problem; empty if the data set is sound."""
    passed: str = ""
    """Sentences on what a sound data set was checked for. They are not valid if there are problems."""


def verify_dataset(prefix: Path, vocabulary: int | None = None) -> DatasetCheck:
    """Read and check all bytes of a data set, and return the problems that were found.

    Args:
        prefix: Path of the data set without suffix.
        vocabulary: Number of entries of the tokenizer. Token ids must be smaller. None takes the number of the
            manifest. If there is no manifest either, only negative ids are found.
    """
    try:
        dataset = open_dataset(prefix)
    except DatasetError as error:
        return DatasetCheck((str(error),))
    vocabulary = vocabulary or dataset.vocabulary
    problems = []
    if dataset.manifest:
        actual_sha256 = compute_sha256(dataset.idx_path)
        recorded_sha256 = dataset.manifest.idx_sha256
        if actual_sha256 != recorded_sha256:
            problems.append(
                f"{dataset.idx_path} has sha256 {actual_sha256}, its manifest says {recorded_sha256}."
            )
    problems += [*_check_pointers(dataset), *_check_tokens(dataset, vocabulary)]
    if not problems:
        problems += _check_boundaries(dataset)
    return DatasetCheck(tuple(problems), _describe_passed_check(dataset, vocabulary))


def _describe_passed_check(dataset: Dataset, vocabulary: int | None) -> str:
    """Return the sentences that say which checks a sound data set has passed, and its counts.

    A vocabulary of None means that it is unknown, so that token ids were not checked.
    """
    if dataset.manifest:
        scope = "every byte agrees with the manifest's sha256, and the structure is sound"
    else:
        scope = (
            "the structure is sound; without a manifest, changed tokens within the vocabulary cannot "
            "be detected"
        )
    ids = "vocabulary unknown, so ids unchecked (give --vocabulary)"
    if vocabulary:
        ids = f"ids below {vocabulary:,}"
    return f"{scope}. {dataset.documents:,} documents, {dataset.tokens:,} tokens, {ids}."


def find_index_faults(dataset: Dataset) -> list[str]:
    """Return one sentence per fault of the index; empty if it is sound.

    Sequences must follow one another in the `.bin`, and documents must follow one another in the list of
    sequences. Only the last token of each sequence is read.
    """
    return [*_check_pointers(dataset)] or [*_check_boundaries(dataset)]


def find_common_end_token(dataset: Dataset) -> int | None:
    """Return the token with which all sequences end, or None if they end with different tokens.

    This is the end-of-document token if preprocessing appended one. Empty sequences are ignored. A data set
    without tokens gives None.
    """
    if not dataset.tokens:
        return None
    tokens, lengths, pointers = dataset.stored, dataset.lengths, dataset.pointers
    itemsize = np.dtype(dataset.dtype).itemsize
    common_token: int | None = None
    for sequences in iterate_chunks(dataset.sequences):
        ends = pointers[sequences] // itemsize + lengths[sequences]
        last_tokens = tokens[ends[lengths[sequences] > 0] - 1]
        if common_token is None and len(last_tokens):
            common_token = int(last_tokens[0])
        if (last_tokens != common_token).any():
            return None
    return common_token


def _check_pointers(dataset: Dataset) -> Iterator[str]:
    """Yield a sentence on the first sequence that does not start where the sequence before it ends."""
    itemsize = np.dtype(dataset.dtype).itemsize
    chunk_start = 0
    for sequences in iterate_chunks(dataset.sequences):
        lengths, pointers = dataset.lengths[sequences], dataset.pointers[sequences]
        ends = chunk_start + itemsize * np.cumsum(lengths, dtype=np.int64)
        starts = np.concatenate(([chunk_start], ends[:-1]))
        wrong = _find_first((lengths < 0) | (pointers != starts))
        if wrong is not None:
            yield (
                f"{dataset.idx_path}: sequence {sequences.start + wrong} has length {lengths[wrong]} "
                f"and byte offset {pointers[wrong]}, but must start at byte {starts[wrong]}."
            )
            return
        chunk_start = int(ends[-1])


def _check_boundaries(dataset: Dataset) -> Iterator[str]:
    """Yield a sentence if the first document boundary is not 0, and a sentence on the first wrong document.

    A document is wrong if its boundaries decrease. It is also wrong if it holds several sequences although one
    token ends every sequence, because that token is then the end-of-document token. Megatron would not notice
    such a document. `open_dataset` has already checked the last boundary.
    """
    first_boundary = dataset.boundaries[0]
    if first_boundary != 0:
        yield f"{dataset.idx_path}: document boundary 0 is {first_boundary}, not 0."
    max_sequences, reason = np.inf, ""
    end_token = find_common_end_token(dataset)
    if end_token is not None and dataset.sequences >= 2:
        max_sequences = 1
        reason = f", though every sequence ends in token {end_token}, which ends documents"
    for documents in iterate_chunks(dataset.documents):
        boundaries = dataset.boundaries[documents.start : documents.stop + 1]
        sequences_per_document = np.diff(boundaries)
        is_wrong = (sequences_per_document < 0) | (sequences_per_document > max_sequences)
        wrong = _find_first(is_wrong)
        if wrong is not None:
            yield (
                f"{dataset.idx_path}: document {documents.start + wrong} holds "
                f"{sequences_per_document[wrong]} sequences{reason}."
            )
            return


def _check_tokens(dataset: Dataset, vocabulary: int | None) -> Iterator[str]:
    """Yield a sentence on the first token id outside the vocabulary, or on the first damaged shard.

    If `vocabulary` is None, only negative ids are outside. Without a manifest no hash is compared.
    """
    largest_id = np.iinfo(dataset.dtype).max if vocabulary is None else vocabulary - 1
    shards: list[tuple[int, str | None]] = [(dataset.tokens, None)]
    if dataset.manifest:
        shards = [(shard.tokens, shard.sha256) for shard in dataset.manifest.shards]
    digest = hashlib.sha256()
    shard_start = 0
    with dataset.bin_path.open("rb") as stream:
        for num_tokens, recorded_sha256 in shards:
            shard_end = shard_start + num_tokens
            for chunk in iterate_chunks(num_tokens):
                tokens = np.fromfile(stream, dataset.dtype, chunk.stop - chunk.start)
                if recorded_sha256 is not None:
                    digest.update(tokens)
                wrong = _find_first((tokens < 0) | (tokens > largest_id))
                if wrong is not None:
                    position = shard_start + chunk.start + wrong
                    yield (
                        f"{dataset.bin_path}: token {position} is "
                        f"{tokens[wrong]}, outside the vocabulary of {largest_id + 1}."
                    )
                    return
            # The hash of a shard covers the `.bin` from its first byte to the shard's end.
            if recorded_sha256 not in (None, digest.hexdigest()):
                yield (
                    f"{dataset.bin_path} differs from its manifest within tokens {shard_start} to "
                    f"{shard_end}."
                )
                return
            shard_start = shard_end


def _find_first(flags: IntArray) -> int | None:
    """Return the index of the first True, or None if all are False."""
    return int(flags.argmax()) if flags.any() else None
