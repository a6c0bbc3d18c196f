"""Measure a data set, and describe in lines of text what it holds and how much of it a run draws.

`measure_dataset` reads all tokens once and returns `Stats`. The functions `describe_…` and `text_histogram`
return the lines that the command `stats` of preprocessing prints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parakit.data.indexed import Dataset, DatasetError, iterate_chunks
from parakit.data.split import Draw
from parakit.data.verify import find_common_end_token, find_index_faults
from parakit.formatting.units import plural

LENGTH_BINS = 32
"""Index of the last bin of a histogram of document lengths.

Bin 0 counts empty documents; bin k counts documents of 2^(k-1) to 2^k - 1 tokens.
"""
_BAR_CHARACTERS = 40
"""Length of the longest bar of a printed histogram."""


@dataclass(frozen=True)
class Stats:
    """Counts over all documents of a data set. Lengths are in tokens."""

    documents: int
    sequences: int
    tokens: int
    empty_documents: int
    longest_document: int
    length_histogram: tuple[int, ...]
    """Number of documents per bin of length; LENGTH_BINS explains the bins."""
    eod: int | None
    """End-of-document token of the manifest or, without a manifest, the token that ends every sequence.

    None if there is no such token.
    """
    eod_tokens: int
    """Number of end-of-document tokens in the data set."""
    text_bytes: int | None
    """UTF-8 bytes of the documents; None without a manifest."""


def measure_dataset(dataset: Dataset) -> Stats:
    """Read all tokens of a data set once, in bounded memory, and return its counts.

    Raises:
        DatasetError: The index is damaged: sequences or documents do not follow one another.
    """
    faults = find_index_faults(dataset)
    if faults:
        raise DatasetError(faults[0])
    histogram = np.zeros(LENGTH_BINS + 1, dtype=np.int64)
    longest = 0
    for documents in iterate_chunks(dataset.documents):
        boundaries = dataset.boundaries[documents.start : documents.stop + 1]
        lengths = np.diff(dataset.tokens_before(boundaries))
        # The exponent that frexp returns is the number of binary digits of a length, which is its bin.
        _, bins = np.frexp(lengths)
        histogram += np.bincount(bins, minlength=len(histogram))
        longest = max(longest, int(lengths.max()))
    manifest = dataset.manifest
    eod = manifest.identity.eod if manifest else find_common_end_token(dataset)
    eod_tokens = 0
    if eod is not None:
        eod_tokens = sum(int((tokens == eod).sum()) for tokens in dataset.token_chunks())
    return Stats(
        documents=dataset.documents,
        sequences=dataset.sequences,
        tokens=dataset.tokens,
        empty_documents=int(histogram[0]),
        longest_document=longest,
        length_histogram=tuple(histogram.tolist()),
        eod=eod,
        eod_tokens=eod_tokens,
        text_bytes=manifest.text_bytes if manifest else None,
    )


def describe_counts(dataset: Dataset, stats: Stats) -> Iterator[str]:
    """Yield one line per count of the data set, in two columns: name and value.

    A value that needs a manifest is given as unknown if there is no manifest.
    """
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
        fraction = stats.eod_tokens / max(stats.tokens, 1)
        yield f"end-of-document   token {stats.eod}, {fraction:.3%} of all tokens"


def describe_draws(draws: Sequence[Draw], seq_length: int, steps: int) -> Iterator[str]:
    """Yield one line per part with its size and samples, then one line on what training draws.

    A part without sequences gets a further line, because Megatron cannot evaluate on it.

    Args:
        draws: Training, validation and test part.
        seq_length: Tokens per sample.
        steps: Training iterations.
    """
    for draw in draws:
        yield (
            f"{draw.split:5} {draw.sequences:,} sequences, {draw.tokens:,} tokens, "
            f"{draw.samples_an_epoch:,} samples of {seq_length} per epoch"
        )
        if draw.sequences == 0:
            yield f"      empty: Megatron cannot evaluate on it; weigh {draw.split} more in --split"
    train = draws[0]
    if train.tokens:
        epochs_drawn = train.samples * seq_length / train.tokens
        yield (
            f"{steps:,} steps draw {train.samples:,} samples: {epochs_drawn:.2f} of the training "
            f"tokens, from {plural(train.epochs, 'epoch')}"
        )


def text_histogram(counts: Sequence[int]) -> list[str]:
    """Return one line per bin of a histogram, with label, bar and count.

    Empty bins before the first and after the last filled bin are left out. The list is empty if no bin has a
    document.

    Args:
        counts: Number of documents per bin, as in `Stats.length_histogram`.
    """
    filled_bins = [bin_ for bin_, count in enumerate(counts) if count]
    if not filled_bins:
        return []
    shown_bins = range(filled_bins[0], filled_bins[-1] + 1)
    label_width = max(len(bin_label(bin_)) for bin_ in shown_bins)
    lines = []
    for bin_ in shown_bins:
        bar = "█" * math.ceil(counts[bin_] * _BAR_CHARACTERS / max(counts))
        lines.append(f"{bin_label(bin_):>{label_width}} {bar:{_BAR_CHARACTERS}} {counts[bin_]:,}")
    return lines


def bin_label(bin_: int) -> str:
    """Return the document lengths of a bin as text, such as `512–1,023`, `1` or `0`."""
    if bin_ == 0:
        return "0"
    low, high = 2 ** (bin_ - 1), 2**bin_ - 1
    return str(low) if low == high else f"{low:,}–{high:,}"
