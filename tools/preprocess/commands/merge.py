"""Join data sets in the order given, in bounded memory: the parts of `--shard i/n`, or others."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.preprocess.dataset import strip_suffix
from tools.preprocess.merge import merge


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("prefix", type=Path, nargs="+", help="such as part-0_text_document")
    parser.add_argument("--output-prefix", type=Path, required=True, help="writes PREFIX.bin/.idx")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished data set")


def run(flags: argparse.Namespace) -> int:
    """Carry it out."""
    dataset = merge(
        [strip_suffix(path) for path in flags.prefix],
        strip_suffix(flags.output_prefix),
        flags.overwrite,
        say=lambda sentence: print(sentence, file=sys.stderr),
    )
    print(f"{dataset.prefix}: {dataset.documents:,} documents, {dataset.tokens:,} tokens")
    return 0
