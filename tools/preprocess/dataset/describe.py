"""Statistics for people: lines, document lengths as bars, and the same as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.preprocess.dataset.files import Dataset
from tools.preprocess.dataset.stats import Draw, Stats
from tools.preprocess.errors import OutputError

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
