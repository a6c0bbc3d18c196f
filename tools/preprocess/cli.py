"""The command line of `python -m tools.preprocess`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.preprocess.dataset import Dataset
from tools.preprocess.errors import PreprocessError
from tools.preprocess.job import Options, preprocess
from tools.preprocess.sample import write_sample
from tools.preprocess.tokenizer import GPT2


def main(arguments: Sequence[str]) -> int:
    """Run a subcommand, or without one preprocess `--input`; the exit status."""
    name = arguments[0] if arguments and arguments[0] in _COMMANDS else ""
    try:
        return _COMMANDS[name](arguments[1:] if name else arguments)
    except PreprocessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _preprocess(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.preprocess", description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="JSON lines")
    parser.add_argument("--output-prefix", type=Path, required=True)
    parser.add_argument("--tokenizer", default=GPT2)
    parser.add_argument("--append-eod", action="store_true")
    parser.add_argument("--json-keys", nargs="+", default=["text"])
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    flags = parser.parse_args(arguments)
    _report(
        preprocess(
            Options(
                inputs=tuple(flags.input),
                output_prefix=flags.output_prefix,
                tokenizer=flags.tokenizer,
                append_eod=flags.append_eod,
                json_keys=tuple(flags.json_keys),
                restart=flags.restart,
                overwrite=flags.overwrite,
            )
        )
    )
    return 0


def _sample(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.preprocess sample")
    parser.add_argument("--output-prefix", type=Path, required=True)
    flags = parser.parse_args(arguments)
    text = flags.output_prefix.with_name(flags.output_prefix.name + ".jsonl")
    write_sample(text)
    _report(
        preprocess(
            Options((str(text),), flags.output_prefix, GPT2, append_eod=True, overwrite=True)
        )
    )
    return 0


def _report(datasets: Sequence[Dataset]) -> None:
    for dataset in datasets:
        print(f"{dataset.prefix}: {dataset.documents:,} documents, {dataset.tokens:,} tokens")


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"": _preprocess, "sample": _sample}
