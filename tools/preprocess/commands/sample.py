"""Make the sample data set: GPT-2 ids of prose that every Python carries."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.preprocess.commands.run import make
from tools.preprocess.job import Options
from tools.preprocess.sample import write_sample
from tools.preprocess.source import Selection


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--output-prefix", type=Path, default=Path("owt-ds/sample"), help="prefix")
    once = "leave out paragraphs that stood before, so that validation holds nothing of training"
    parser.add_argument("--unique", action="store_true", help=once)


def run(flags: argparse.Namespace) -> int:
    """Carry it out."""
    prefix: Path = flags.output_prefix
    text = prefix.with_name(prefix.name + ".jsonl")
    write_sample(text, unique=flags.unique)
    return make(Options(Selection((str(text),)), prefix, append_eod=True))
