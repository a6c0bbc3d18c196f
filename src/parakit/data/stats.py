"""What a data set holds and how much of it a training run draws, in figures and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parakit.data.indexed import Dataset, DatasetError, stretches
from parakit.data.split import Draw
from parakit.data.verify import common_end, structure_flaws
from parakit.formatting.units import plural

LENGTH_BINS = 32
"""Bin 0 is length 0, bin k is lengths from 2^(k-1) to 2^k - 1."""
_BAR_CHARACTERS = 40


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


def measure_dataset(dataset: Dataset) -> Stats:
    """Read a data set once, in bounded memory.

    Raises:
        DatasetError: Its sequences or documents do not follow one another.
    """
    if flaws := structure_flaws(dataset):
        raise DatasetError(flaws[0])
    histogram = np.zeros(LENGTH_BINS + 1, dtype=np.int64)
    longest = 0
    for part in stretches(dataset.documents):
        lengths = np.diff(dataset.tokens_before(dataset.boundaries[part.start : part.stop + 1]))
        # frexp's exponent is the number of binary digits.
        histogram += np.bincount(np.frexp(lengths)[1], minlength=len(histogram))
        longest = max(longest, int(lengths.max()))
    manifest = dataset.manifest
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


def describe_counts(dataset: Dataset, stats: Stats) -> Iterator[str]:
    """What is in the data set, one line a fact."""
    tokenizer = dataset.manifest.identity.tokenizer if dataset.manifest else "unknown"
    yield f"{dataset.prefix}: {dataset.dtype}, tokenizer {tokenizer}"
    yield f"documents         {stats.documents:,} ({stats.empty_documents:,} empty)"
    yield f"tokens            {stats.tokens:,}"
    yield f"longest document  {stats.longest_document:,} tokens"
    if stats.documents:
        yield f"mean document     {stats.tokens / stats.documents:,.1f} tokens"
    if stats.text_bytes:
        yield f"tokens per byte   {stats.tokens / stats.text_bytes:.4f}"
    else:
        yield "tokens per byte   unknown (only a manifest has the text's size)"
    if stats.eod is None:
        yield "end-of-document   none"
    else:
        share = stats.eod_tokens / max(stats.tokens, 1)
        yield f"end-of-document   token {stats.eod}, {share:.3%} of all tokens"


def describe_draws(draws: Sequence[Draw], seq_length: int, steps: int) -> Iterator[str]:
    """What a run draws from each split, and whether one is empty."""
    for draw in draws:
        yield (
            f"{draw.split:5} {draw.sequences:,} sequences, {draw.tokens:,} tokens, "
            f"{draw.samples_an_epoch:,} samples of {seq_length} an epoch"
        )
        if draw.sequences == 0:
            yield f"      empty: Megatron cannot evaluate on it; weigh {draw.split} more in --split"
    train = draws[0]
    if train.tokens:
        share = train.samples * seq_length / train.tokens
        yield (
            f"{steps:,} steps draw {train.samples:,} samples: {share:.2f} of the training tokens, "
            f"from {plural(train.epochs, 'epoch')}"
        )


def text_histogram(counts: Sequence[int]) -> list[str]:
    """One line a bin, from the first to the last that is not empty."""
    filled = [bin_ for bin_, count in enumerate(counts) if count]
    used = range(filled[0], filled[-1] + 1) if filled else ()
    width = max((len(label(i)) for i in used), default=0)
    bars = {i: "█" * -(-counts[i] * _BAR_CHARACTERS // max(counts)) for i in used}
    return [f"{label(i):>{width}} {bars[i]:{_BAR_CHARACTERS}} {counts[i]:,}" for i in used]


def label(bin_: int) -> str:
    """Lengths of a bin, such as `512–1023`."""
    if bin_ == 0:
        return "0"
    low, high = 2 ** (bin_ - 1), 2**bin_ - 1
    return str(low) if low == high else f"{low:,}–{high:,}"
