"""The command line of `python -m tools.preprocess`."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace as Flags
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec

from parakit.artifacts.io import write_atomically
from parakit.data import (
    Dataset,
    DatasetError,
    count_draws,
    describe_counts,
    describe_draws,
    measure_dataset,
    merge_datasets,
    open_dataset,
    strip_suffix,
    text_histogram,
    verify_dataset,
)
from parakit.formatting.units import plural
from tools.preprocess.hub import OPENWEBTEXT, Hub, comparison
from tools.preprocess.plain_text import TextDocuments
from tools.preprocess.run import preprocess
from tools.preprocess.source import PreprocessOptions, parse_shard

Add = Callable[..., Any]
"""argparse's `add_argument`."""

INTERRUPTED = 130
PROGRAM = "python -m tools.preprocess"

_LISTS = 'give each document as a list of its sentences, {"text": ["One.", "Two."]}'
_ALWAYS = "leave it away"
_FOLDER = "--tokenizer FOLDER with a tokenizer.json"
_GPT2_FILES = f"give --tokenizer gpt2, whose files the kit brings, or {_FOLDER}"
_UPSTREAM = {
    "--split-sentences": f"split the text before, and {_LISTS}",
    "--keep-newlines": f"it only concerns --split-sentences; {_ALWAYS}, texts are never changed",
    "--lang": f"it only concerns --split-sentences; {_ALWAYS}",
    "--partitions": "run once with --shard I/N for each part, at the same time or on other "
    "machines, and join them with the command merge",
    "--keep-sequential-samples": f"the order of the input is always kept; {_ALWAYS}",
    "--log-interval": f"progress is shown by itself; {_ALWAYS}",
    "--tokenizer-type": f"give --tokenizer gpt2, or {_FOLDER}",
    "--tokenizer-model": f"give {_FOLDER}; SentencePiece and "
    "tiktoken files given as --tokenizer FILE are recognized and how to convert them is printed",
    "--vocab-file": _GPT2_FILES,
    "--merge-file": _GPT2_FILES,
    "--vocab-size": f"the tokenizer decides it; {_ALWAYS}",
}
"""Flags of Megatron's script, each with what to use instead."""


def main(arguments: Sequence[str], program: str = PROGRAM) -> int:
    """Run a command of the command line and return its exit status. Without a command, `run` is run.

    Errors are printed on stderr and give 1. Ctrl-C gives INTERRUPTED.
    """
    argv = list(arguments)
    if not argv or argv[0] not in (*_COMMANDS, "-h", "--help"):
        argv.insert(0, "run")
    try:
        _refuse_upstream_flags(argv)
        flags = command_line(program).parse_args(argv)
        return int(flags.command(flags))
    except DatasetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last commit.", file=sys.stderr)
        return INTERRUPTED


def _refuse_upstream_flags(argv: Sequence[str]) -> None:
    """Raise DatasetError for a flag of Megatron's script that this tool lacks; the message says what to use."""
    for argument in argv:
        flag = argument.partition("=")[0]
        if flag in _UPSTREAM:
            raise DatasetError(
                f"{flag} is a flag of Megatron's preprocess_data.py, not of this tool: "
                f"{_UPSTREAM[flag]}."
            )


def command_line(program: str = PROGRAM) -> argparse.ArgumentParser:
    """Return the parser of the command line. The completion of the shell uses the parser too."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Text to Megatron's data sets. Without a command: run.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (command, add_flags) in _COMMANDS.items():
        command_parser = commands.add_parser(
            name,
            help=command.__doc__,
            description=command.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command_parser.set_defaults(command=command)
        add_flags(command_parser.add_argument)
    return parser


def _number(flag: str, least: int, unit: float = 1) -> Callable[[str], int]:
    """Return a function that parses the number of a flag from text.

    The function multiplies the number by `unit` and rounds it. It raises DatasetError for a negative number, and for 0
    if `least` is 1.

    Args:
        flag: Name of the flag, for error messages.
        least: Smallest allowed value, 0 or 1.
        unit: Number by which the value is multiplied.
    """

    def read(text: str) -> int:
        value = int(text) if unit == 1 else float(text)
        if value <= 0 and least == 1:
            raise DatasetError(f"{flag} {value:g} is not positive.")
        if value < 0:
            raise DatasetError(f"{flag} {value:g} is negative.")
        return max(least, round(value * unit))

    return read


def _summary(dataset: Dataset) -> str:
    """Return a line with the numbers of documents and tokens."""
    return (
        f"{dataset.prefix}: {plural(dataset.documents, 'document')}, "
        f"{plural(dataset.tokens, 'token')}"
    )


def _add_run_flags(add: Add) -> None:
    """Add the flags of `run` to a parser. The `dest` of each flag is a field of `PreprocessOptions`."""
    add(
        "--input",
        dest="inputs",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files (JSON lines, plain, .gz or .zst; parquet; .txt), folders, globs, or hub:NAME",
    )
    add(
        "--output-prefix",
        type=Path,
        required=True,
        help="writes PREFIX_KEY_document.bin/.idx",
    )
    add("--tokenizer", default="gpt2", help="gpt2, or a folder with a tokenizer.json")
    add("--append-eod", action="store_true", help="end each document with the end token")
    add(
        "--txt-documents",
        dest="text_documents",
        choices=[documents.value for documents in TextDocuments],
        default="file",
        help="what is a document of a .txt file: the file, or each paragraph",
    )
    add(
        "--json-keys",
        dest="keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="a data set for each key",
    )
    add(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at an unusable document",
    )
    add(
        "--shard",
        type=parse_shard,
        default="0/1",
        metavar="I/N",
        help="only this part, from 0; or 'slurm'",
    )
    add(
        "--cross-check",
        type=_number("--cross-check", 0),
        default=64,
        metavar="N",
        help="documents encoded by Hugging Face tokenizers too, and compared",
    )
    add(
        "--max-document-mb",
        dest="max_document_bytes",
        type=_number("--max-document-mb", 1, unit=1e6),
        metavar="MB",
        help="refuse documents larger than this",
    )
    add(
        "--commit-mib",
        dest="part_bytes",
        type=_number("--commit-mib", 1, unit=2**20),
        default="64",
        metavar="MIB",
        help="input between two commits that a resumed run can start from",
    )
    add(
        "--workers",
        dest="threads",
        type=_number("--workers", 0),
        default=0,
        metavar="N",
        help="threads; 0 is one for each core",
    )
    _add_hub_split(add)
    add("--restart", action="store_true", help="drop what an unfinished run has left")
    add("--overwrite", action="store_true", help="replace a finished data set")


def _add_hub_split(add: Add) -> None:
    """Add the flags that choose a split of a data set on the hub."""
    add("--hub-config", metavar="NAME", help="of hub:NAME")
    add("--hub-split", default="train", metavar="NAME", help="of hub:NAME")


def _run(flags: Flags) -> int:
    """Make data sets from JSON lines, parquet or the hub; resumes where it was cut off."""
    fields = vars(flags) | {
        "inputs": tuple(flags.inputs),
        "keys": tuple(flags.keys),
        "text_documents": TextDocuments(flags.text_documents),
    }
    del fields["command"]
    for dataset in preprocess(PreprocessOptions(**fields)):
        print(_summary(dataset))
        if dataset.manifest is None:
            continue
        for kind, count in dataset.manifest.problems.items():
            print(f"  {count:,} × {kind}")
    return 0


def _run_gpt2(text: Path, prefix: Path) -> int:
    """Make a data set of GPT-2 ids from JSON lines; return the exit status."""
    return main(["--input", str(text), "--output-prefix", str(prefix), "--append-eod"])


def _add_sample_flags(add: Add) -> None:
    """Add the flags of `sample`."""
    add("--output-prefix", type=Path, default=Path("owt-ds/sample"), help="prefix")
    once = "leave out paragraphs that stood before, so that validation holds nothing of training"
    add("--unique", action="store_true", help=once)


def _sample(flags: Flags) -> int:
    """Make the sample data set: GPT-2 ids of prose that every Python carries."""
    prefix: Path = flags.output_prefix
    text = prefix.with_name(prefix.name + ".jsonl")
    write_sample(text, unique=flags.unique)
    return _run_gpt2(text, prefix)


def sample_documents() -> list[str]:
    """Return the paragraphs of Python's help, topic by topic in alphabetical order.

    Each paragraph is a document, so that there are more than a thousand documents. The published split gives one
    document in a thousand to the test set, and Megatron never ends if the test set has no documents.
    """
    paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return [paragraph for paragraph in paragraphs if paragraph.strip()]


def write_sample(path: Path, unique: bool = False) -> None:
    """Write the documents of `sample_documents` to a file of JSON lines.

    With `unique`, a paragraph that occurs in several topics is written once. A file that already has this content is
    not touched.
    """
    documents = sample_documents()
    chosen = dict.fromkeys(documents) if unique else documents
    content = b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in chosen)
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def _add_hub_flags(add: Add) -> None:
    """Add the flags of `hub`."""
    add("name", help=f"such as {OPENWEBTEXT}")
    add("--output-prefix", type=Path, required=True, help="writes PREFIX.jsonl and the data set")
    _add_hub_split(add)


def _hub(flags: Flags) -> int:
    """Fetch a data set of the Hugging Face hub as JSON lines, then make GPT-2 ids of its key 'text'.

    Repeating it resumes. (--input hub:NAME streams instead.)
    """
    prefix: Path = flags.output_prefix
    dataset_prefix = prefix.with_name(f"{prefix.name}_text_document")
    code = 0
    try:
        print(f"{_summary(open_dataset(dataset_prefix))}, made before")
    except DatasetError:  # There is no data set yet.
        lines = prefix.with_name(prefix.name + ".jsonl")
        if not lines.is_file():
            Hub(flags.name, flags.hub_config, flags.hub_split).fetch("text", lines)
        code = _run_gpt2(lines, prefix)
    if code == 0 and flags.name == OPENWEBTEXT:
        print(comparison(open_dataset(dataset_prefix)))
    return code


def _add_merge_flags(add: Add) -> None:
    """Add the flags of `merge`."""
    add("prefix", type=Path, nargs="+", help="such as part-0_text_document")
    add("--output-prefix", type=Path, required=True, help="writes PREFIX.bin/.idx")
    add("--overwrite", action="store_true", help="replace a finished data set")


def _merge(flags: Flags) -> int:
    """Join data sets in the order given, in bounded memory: the parts of --shard i/n, or others."""
    inputs = [strip_suffix(path) for path in flags.prefix]
    output = strip_suffix(flags.output_prefix)
    dataset = merge_datasets(
        inputs, output, flags.overwrite, lambda text: print(text, file=sys.stderr)
    )
    print(_summary(dataset))
    return 0


def _add_verify_flags(add: Add) -> None:
    """Add the flags of `verify`."""
    add("prefix", type=Path, nargs="+", help="such as owt-ds/sample_text_document")
    add("--vocabulary", type=int, help="entries; the manifest's if not given")


def _verify(flags: Flags) -> int:
    """Check every byte of a data set; exits with 1 if anything is wrong."""
    status = 0
    for prefix in map(strip_suffix, flags.prefix):
        verdict = verify_dataset(prefix, flags.vocabulary)
        for problem in verdict.problems:
            print(f"damaged: {problem}")
            status = 1
        if not verdict.problems:
            print(f"{prefix}: {verdict.passed}")
    return status


def _add_stats_flags(add: Add) -> None:
    """Add the flags of `stats`."""
    add("prefix", type=Path, help="such as owt-ds/sample_text_document")
    for flag, default, help_text in (
        ("--seq-length", 1024, "tokens of a sample"),
        ("--steps", 100, "iterations of the run"),
        ("--global-batch-size", 32, "samples of an iteration"),
    ):
        add(flag, type=_number(flag, 1), default=default, help=help_text)
    add("--split", default="949,50,1", help="Megatron's --split")
    add("--json", action="store_true", help="print as JSON")


def _stats(flags: Flags) -> int:
    """Describe a data set: counts, document lengths, and what a training run will draw from it."""
    dataset = open_dataset(strip_suffix(flags.prefix))
    statistics = measure_dataset(dataset)
    samples = flags.steps * flags.global_batch_size
    drawn = count_draws(dataset, flags.split, flags.seq_length, samples)
    if flags.json:
        print(msgspec.json.encode({"stats": statistics, "draws": drawn}).decode())
        return 0
    print(*describe_counts(dataset, statistics), "", sep="\n")
    print(*text_histogram(statistics.length_histogram), "", sep="\n")
    print(*describe_draws(drawn, flags.seq_length, flags.steps), sep="\n")
    return 0


_COMMANDS: dict[str, tuple[Callable[[Flags], int], Callable[[Add], None]]] = {
    "run": (_run, _add_run_flags),
    "sample": (_sample, _add_sample_flags),
    "hub": (_hub, _add_hub_flags),
    "merge": (_merge, _add_merge_flags),
    "verify": (_verify, _add_verify_flags),
    "stats": (_stats, _add_stats_flags),
}
"""Commands by name: the function that runs the command (its docstring is the help), and the one that adds flags."""
