"""Describe a data set: counts, document lengths, and what a training run will draw from it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.preprocess.dataset import Dataset, open_dataset, strip_suffix
from tools.preprocess.errors import PreprocessError
from tools.preprocess.histogram import draw_histogram, text_histogram
from tools.preprocess.manifest import read_manifest
from tools.preprocess.stats import Draw, Stats, draws, measure


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add = parser.add_argument
    add("prefix", type=Path, help="such as owt-ds/sample_text_document")
    add("--seq-length", type=int, default=1024, help="tokens of a sample")
    add("--steps", type=int, default=100, help="iterations of the run")
    add("--global-batch-size", type=int, default=32, help="samples of an iteration")
    add("--split", default="949,50,1", help="Megatron's --split")
    add("--plot", type=Path, help="the picture; PREFIX.lengths.svg if not given")
    add("--json", action="store_true", help="print as JSON, draw nothing unless --plot is given")


def run(flags: argparse.Namespace) -> int:
    """Carry it out."""
    for name in ("seq_length", "steps", "global_batch_size"):
        if getattr(flags, name) < 1:
            raise PreprocessError(f"--{name.replace('_', '-')} must be at least 1.")
    prefix = strip_suffix(flags.prefix)
    dataset = open_dataset(prefix)
    stats = measure(dataset, read_manifest(prefix))
    samples = flags.steps * flags.global_batch_size
    drawn = draws(dataset, flags.split, flags.seq_length, samples)
    plot: Path | None = flags.plot
    if plot is None and not flags.json:
        plot = prefix.with_name(prefix.name + ".lengths.svg")
    if plot is not None:
        draw_histogram(stats.length_histogram, prefix.name, plot)
    if flags.json:
        print(msgspec.json.encode({"stats": stats, "draws": drawn}).decode())
        return 0
    print(*_counts(dataset, stats), "", *text_histogram(stats.length_histogram), "", sep="\n")
    print(*_drawn(drawn, flags.seq_length, flags.steps), sep="\n")
    print(f"picture: {plot}")
    return 0


def _counts(dataset: Dataset, stats: Stats) -> Iterator[str]:
    yield f"{dataset.prefix}: {dataset.dtype}, tokenizer {dataset.tokenizer or 'unknown'}"
    yield f"documents         {stats.documents:,} ({stats.empty_documents:,} empty)"
    yield f"tokens            {stats.tokens:,}"
    yield f"longest document  {stats.longest_document:,} tokens"
    if stats.documents:
        yield f"mean document     {stats.tokens / stats.documents:,.1f} tokens"
    if stats.text_bytes:
        yield f"tokens per byte   {stats.tokens / stats.text_bytes:.4f}"
    else:
        yield "tokens per byte   unknown (only a manifest tells the text's size)"
    if stats.eod is None:
        yield "end-of-document   none"
    else:
        share = stats.eod_tokens / max(stats.tokens, 1)
        yield f"end-of-document   token {stats.eod}, {share:.3%} of all tokens"


def _drawn(drawn: tuple[Draw, ...], seq_length: int, steps: int) -> Iterator[str]:
    train = drawn[0]
    for draw in drawn:
        yield (
            f"{draw.split:5} {draw.sequences:,} sequences, {draw.tokens:,} tokens, "
            f"{draw.samples_an_epoch:,} samples of {seq_length} an epoch"
        )
        if draw.sequences == 0:
            yield f"      empty: Megatron cannot evaluate on it; weigh {draw.split} more in --split"
    if train.tokens:
        share = train.samples * seq_length / train.tokens
        yield (
            f"{steps:,} steps draw {train.samples:,} samples: {share:.2f} of the training tokens, "
            f"from {train.epochs} epoch(s)"
        )
