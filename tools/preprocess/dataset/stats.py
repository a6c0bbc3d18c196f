"""What a data set holds, and how much of it a training run will draw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tools.preprocess.dataset.files import Dataset
from tools.preprocess.dataset.index import IntArray, read_array
from tools.preprocess.dataset.manifest import Manifest
from tools.preprocess.dataset.split import split_bounds
from tools.preprocess.dataset.verify import common_end

LENGTH_BINS = 32
"""Bin 0 is length 0, bin k is lengths from 2^(k-1) to 2^k - 1."""
_ROWS = 1 << 16
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Stats:
    """Counts over a whole data set; lengths in tokens."""

    documents: int
    sequences: int
    tokens: int
    empty_documents: int
    longest_document: int
    length_histogram: tuple[int, ...]
    """Documents by length; see `LENGTH_BINS`."""
    eod: int | None
    """The end-of-document token: the manifest's, or the one every sequence ends in."""
    eod_tokens: int
    """How many of the tokens it is."""
    text_bytes: int | None
    """UTF-8 bytes of the documents; only a manifest tells."""


@dataclass(frozen=True)
class Draw:
    """What Megatron's GPT data set draws from one split (`megatron/core/datasets/gpt_dataset.py`)."""

    split: str
    sequences: int
    tokens: int
    samples_an_epoch: int
    samples: int
    """Asked for: iterations times global batch; 0 for the other splits."""
    epochs: int
    """Passes over the split that it takes Megatron to have that many."""


def measure(dataset: Dataset, manifest: Manifest | None) -> Stats:
    """Read a data set once, in bounded memory."""
    histogram = np.zeros(LENGTH_BINS + 1, dtype=np.int64)
    longest = 0
    for lengths in _document_lengths(dataset):
        # frexp's exponent is the number of binary digits.
        histogram += np.bincount(np.frexp(lengths)[1], minlength=len(histogram))
        longest = max(longest, int(lengths.max()))
    eod = manifest.identity.eod if manifest else common_end(dataset)
    return Stats(
        documents=dataset.documents,
        sequences=dataset.sequences,
        tokens=dataset.tokens,
        empty_documents=int(histogram[0]),
        longest_document=longest,
        length_histogram=tuple(histogram.tolist()),
        eod=eod,
        eod_tokens=0 if eod is None else sum(int((t == eod).sum()) for t in dataset.token_chunks()),
        text_bytes=manifest.text_bytes if manifest else None,
    )


def draws(dataset: Dataset, split: str, seq_length: int, samples: int) -> tuple[Draw, ...]:
    """What each split holds, and what a run draws from the first.

    Args:
        dataset: The data set.
        split: Megatron's `--split`, such as `949,50,1`; it cuts by sequences.
        seq_length: Tokens of a sample.
        samples: To be drawn for training: iterations times global batch.
    """
    bounds = split_bounds(split, dataset.sequences)
    offsets = [_token_offset(dataset, bound) for bound in bounds]
    found: list[Draw] = []
    for index, name in enumerate(SPLITS):
        tokens = offsets[index + 1] - offsets[index]
        wanted = samples if index == 0 else 0
        # One token more than the sample: the last one is only predicted.
        needed = wanted * seq_length + 1
        found.append(
            Draw(
                split=name,
                sequences=bounds[index + 1] - bounds[index],
                tokens=tokens,
                samples_an_epoch=max(0, (tokens - 1) // seq_length),
                samples=wanted,
                epochs=-(-needed // tokens) if wanted and tokens else 0,
            )
        )
    return tuple(found)


def _token_offset(dataset: Dataset, sequence: int) -> int:
    """Tokens before a sequence."""
    if sequence >= dataset.sequences:
        return dataset.tokens
    pointer = _read(dataset, dataset.header.pointers_offset + 8 * sequence, 1)
    return int(pointer[0]) // np.dtype(dataset.dtype).itemsize


def _document_lengths(dataset: Dataset) -> Iterator[IntArray]:
    header = dataset.header
    itemsize = np.dtype(dataset.dtype).itemsize
    for first in range(0, header.documents, _ROWS):
        count = min(_ROWS, header.documents - first)
        boundaries = _read(dataset, header.boundaries_offset + 8 * first, count + 1)
        start, stop = int(boundaries[0]), int(boundaries[-1])
        pointers = _read(dataset, header.pointers_offset + 8 * start, stop - start + 1)
        if stop == header.sequences:  # what follows the last pointer is no pointer
            pointers = np.append(pointers[: stop - start], dataset.tokens * itemsize)
        yield np.diff(pointers[boundaries - start]) // itemsize


def _read(dataset: Dataset, offset: int, count: int) -> IntArray:
    chunks = list(read_array(dataset.idx_path, offset, "<i8", count))
    return np.concatenate(chunks) if chunks else np.empty(0, np.int64)
