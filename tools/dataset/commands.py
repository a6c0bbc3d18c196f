"""The commands that take finished data sets: `merge`, `verify` and `stats` of `tools.preprocess`."""

from __future__ import annotations

import sys
from argparse import Namespace as Flags
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tools.dataset import stats
from tools.dataset.indexed import Dataset, DatasetError, open_dataset, strip_suffix
from tools.dataset.merge import merge
from tools.dataset.split import draws
from tools.dataset.verify import verify

Add = Callable[..., Any]
"""argparse's `add_argument`."""
Commands = dict[str, tuple[Callable[[Flags], int], Callable[[Add], None]]]
"""By name: what runs it (its docstring is the help) and what adds its flags."""


def whole_number(flag: str, least: int) -> Callable[[str], int]:
    """A reader of the value of `flag`, which is at least 0 or 1."""

    def read(text: str) -> int:
        if (value := int(text)) >= least:
            return value
        raise DatasetError(f"{flag} {value} is {'not positive' if least else 'negative'}.")

    return read


def summary(dataset: Dataset) -> str:
    """One line of counts."""
    return f"{dataset.prefix}: {dataset.documents:,} documents, {dataset.tokens:,} tokens"


def _add_merge_flags(add: Add) -> None:
    add("prefix", type=Path, nargs="+", help="such as part-0_text_document")
    add("--output-prefix", type=Path, required=True, help="writes PREFIX.bin/.idx")
    add("--overwrite", action="store_true", help="replace a finished data set")


def _merge(flags: Flags) -> int:
    """Join data sets in the order given, in bounded memory: the parts of --shard i/n, or others."""
    inputs = [strip_suffix(path) for path in flags.prefix]
    output = strip_suffix(flags.output_prefix)
    dataset = merge(inputs, output, flags.overwrite, lambda text: print(text, file=sys.stderr))
    print(summary(dataset))
    return 0


def _add_verify_flags(add: Add) -> None:
    add("prefix", type=Path, nargs="+", help="such as owt-ds/sample_text_document")
    add("--vocabulary", type=int, help="entries; the manifest's if not given")


def _verify(flags: Flags) -> int:
    """Check every byte of a data set; exits with 1 if anything is wrong."""
    status = 0
    for prefix in map(strip_suffix, flags.prefix):
        verdict = verify(prefix, flags.vocabulary)
        for problem in verdict.problems:
            print(f"damaged: {problem}")
            status = 1
        if not verdict.problems:
            print(f"{prefix}: {verdict.describe()}")
    return status


def _add_stats_flags(add: Add) -> None:
    add("prefix", type=Path, help="such as owt-ds/sample_text_document")
    for flag, default, what in (
        ("--seq-length", 1024, "tokens of a sample"),
        ("--steps", 100, "iterations of the run"),
        ("--global-batch-size", 32, "samples of an iteration"),
    ):
        add(flag, type=whole_number(flag, 1), default=default, help=what)
    add("--split", default="949,50,1", help="Megatron's --split")
    add("--json", action="store_true", help="print as JSON")


def _stats(flags: Flags) -> int:
    """Describe a data set: counts, document lengths, and what a training run will draw from it."""
    dataset = open_dataset(strip_suffix(flags.prefix))
    found = stats.measure(dataset)
    samples = flags.steps * flags.global_batch_size
    drawn = draws(dataset, flags.split, flags.seq_length, samples)
    if flags.json:
        print(msgspec.json.encode({"stats": found, "draws": drawn}).decode())
        return 0
    print(*stats.describe_counts(dataset, found), "", sep="\n")
    print(*stats.text_histogram(found.length_histogram), "", sep="\n")
    print(*stats.describe_draws(drawn, flags.seq_length, flags.steps), sep="\n")
    return 0


COMMANDS: Commands = {
    "merge": (_merge, _add_merge_flags),
    "verify": (_verify, _add_verify_flags),
    "stats": (_stats, _add_stats_flags),
}
