"""What a data set holds and how much of it a training run draws; as lines, as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.preprocess.dataset.files import Dataset, IntArray
from tools.preprocess.dataset.split import split_bounds
from tools.preprocess.dataset.verify import common_end
from tools.preprocess.errors import OutputError

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


def measure(dataset: Dataset) -> Stats:
    """Read a data set once, in bounded memory."""
    histogram = np.zeros(LENGTH_BINS + 1, dtype=np.int64)
    longest = 0
    for lengths in _document_lengths(dataset):
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
    (pointer,) = next(dataset.pointers(sequence, 1))
    return int(pointer) // np.dtype(dataset.dtype).itemsize


def _document_lengths(dataset: Dataset) -> Iterator[IntArray]:
    itemsize = np.dtype(dataset.dtype).itemsize
    for first in range(0, dataset.documents, _ROWS):
        count = min(_ROWS, dataset.documents - first)
        boundaries = np.concatenate(list(dataset.boundaries(first, count + 1)))
        start, stop = int(boundaries[0]), int(boundaries[-1])
        pointers = list(dataset.pointers(start, min(stop + 1, dataset.sequences) - start))
        if stop == dataset.sequences:
            pointers.append(np.array([dataset.tokens * itemsize]))
        yield np.diff(np.concatenate(pointers)[boundaries - start]) // itemsize


_BAR_CHARACTERS = 40


def describe_counts(dataset: Dataset, stats: Stats) -> Iterator[str]:
    """What is in the data set, one line a fact."""
    yield f"{dataset.prefix}: {dataset.dtype}, tokenizer {dataset.tokenizer or 'unknown'}"
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
            f"from {train.epochs} epoch(s)"
        )


def text_histogram(counts: Sequence[int]) -> list[str]:
    """One line a bin, from the first to the last that is not empty."""
    used = _used(counts)
    most = max((counts[i] for i in used), default=1)
    width = max((len(label(i)) for i in used), default=0)
    bars = {i: "█" * -(-counts[i] * _BAR_CHARACTERS // most) for i in used}
    return [f"{label(i):>{width}} {bars[i]:{_BAR_CHARACTERS}} {counts[i]:,}" for i in used]


def draw_histogram(counts: Sequence[int], title: str, path: Path) -> None:
    """Draw the bins as a bar chart; the suffix (`.svg`, `.png`) says as what.

    Raises:
        OutputError: matplotlib does not know the suffix.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    used = _used(counts)
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.bar([label(i) for i in used], [counts[i] for i in used], color="#4269d0")
    axes.set(xlabel="tokens in a document", ylabel="documents", title=title)
    axes.tick_params(axis="x", rotation=45)
    axes.spines[["top", "right"]].set_visible(False)
    # Without a date and with fixed ids the same data set gives the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with mpl.rc_context({"svg.hashsalt": "tools.preprocess"}):
            figure.savefig(path, metadata=metadata)
    except ValueError:
        raise OutputError(f"--plot {path} has an unknown suffix; use .svg or .png.") from None
    finally:
        plt.close(figure)


def label(bin_: int) -> str:
    """Lengths of a bin, such as `512–1023`."""
    if bin_ == 0:
        return "0"
    low, high = 2 ** (bin_ - 1), 2**bin_ - 1
    return str(low) if low == high else f"{low:,}–{high:,}"


def _used(counts: Sequence[int]) -> list[int]:
    filled = [i for i, count in enumerate(counts) if count]
    return list(range(filled[0], filled[-1] + 1)) if filled else []
