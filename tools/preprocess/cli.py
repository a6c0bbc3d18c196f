"""The command line of `python -m tools.preprocess`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tools.preprocess.dataset.files import Dataset, open_dataset, strip_suffix
from tools.preprocess.dataset.manifest import read_manifest
from tools.preprocess.errors import DatasetError, InputError, PreprocessError

if TYPE_CHECKING:  # Each command imports what it needs: verify runs without a tokenizer.
    from tools.preprocess.output.writer import Progress
    from tools.preprocess.run import Options

INTERRUPTED = 130

Flags = argparse.Namespace
Parser = argparse.ArgumentParser


@dataclass(frozen=True)
class Command:
    """One word of the command line."""

    summary: str
    description: str
    add_flags: Callable[[Parser], None]
    run: Callable[[Flags], int]


def main(arguments: Sequence[str]) -> int:
    """Run a command, or without one make data sets from `--input`; the exit status."""
    name, rest = "run", list(arguments)
    if rest and rest[0] in COMMANDS:
        name = rest.pop(0)
    elif rest in (["-h"], ["--help"]):
        lines = (f"  {name:8} {command.summary}" for name, command in COMMANDS.items())
        print("commands:", *lines, "", sep="\n")
    command = COMMANDS[name]
    parser = Parser(
        prog="python -m tools.preprocess" + ("" if name == "run" else f" {name}"),
        description=command.description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_flags(parser)
    try:
        _refuse_upstream_flags(rest)
        return command.run(parser.parse_args(rest))
    except PreprocessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last commit.", file=sys.stderr)
        return INTERRUPTED


def _refuse_upstream_flags(words: Sequence[str]) -> None:
    """Say of a flag of Megatron's script what takes its place here."""
    for word in words:
        flag = word.partition("=")[0]
        if flag in _UPSTREAM:
            raise InputError(
                f"{flag} is a flag of Megatron's preprocess_data.py, not of this tool: "
                f"{_UPSTREAM[flag]}."
            )


_LISTS = 'give each document as a list of its sentences, {"text": ["One.", "Two."]}'
_ALWAYS = "leave it away"
_UPSTREAM = {
    "--split-sentences": f"split the text before, and {_LISTS}",
    "--keep-newlines": f"it only concerns --split-sentences; {_ALWAYS}, texts are never changed",
    "--lang": f"it only concerns --split-sentences; {_ALWAYS}",
    "--partitions": "run once with --shard I/N for each part, at the same time or on other "
    "machines, and join them with the command merge",
    "--keep-sequential-samples": f"the order of the input is always kept; {_ALWAYS}",
    "--log-interval": f"progress is shown by itself; {_ALWAYS}",
    "--tokenizer-type": "give --tokenizer gpt2, or --tokenizer FOLDER with a tokenizer.json",
    "--tokenizer-model": "give --tokenizer FOLDER with a tokenizer.json; SentencePiece and "
    "tiktoken files given as --tokenizer FILE are recognized and how to convert them is printed",
    "--vocab-file": "give --tokenizer gpt2, whose files the kit brings, or --tokenizer FOLDER "
    "with a tokenizer.json",
    "--merge-file": "give --tokenizer gpt2, whose files the kit brings, or --tokenizer FOLDER "
    "with a tokenizer.json",
    "--vocab-size": f"the tokenizer decides it; {_ALWAYS}",
}


def _add_run_flags(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files (JSON lines, plain, .gz or .zst; parquet), folders, globs, or hub:NAME",
    )
    add("--output-prefix", type=Path, required=True, help="writes PREFIX_KEY_document.bin/.idx")
    add("--tokenizer", default="gpt2", help="gpt2, or a folder with a tokenizer.json")
    add("--append-eod", action="store_true", help="end each document with the end token")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="a data set for each key")
    add("--on-error", choices=("stop", "skip"), default="stop", help="at an unusable document")
    add("--shard", default="0/1", metavar="I/N", help="only this part, from 0; or 'slurm'")
    cross_check = "documents encoded by Hugging Face tokenizers too, and compared"
    add("--cross-check", type=int, default=64, metavar="N", help=cross_check)
    add("--max-document-mb", type=float, metavar="MB", help="refuse documents larger than this")
    commit = "input between two commits that a resumed run can start from"
    add("--commit-mib", type=float, default=64.0, metavar="MIB", help=commit)
    add("--workers", type=int, default=0, metavar="N", help="threads; 0 is one for each core")
    add("--hub-config", metavar="NAME", help="of hub:NAME")
    add("--hub-split", default="train", metavar="NAME", help="of hub:NAME")
    add("--restart", action="store_true", help="drop what an unfinished run has left")
    add("--overwrite", action="store_true", help="replace a finished data set")
    add("--json", action="store_true", help="print the summary as JSON")


def _run(flags: Flags) -> int:
    from tools.preprocess.input.shards import parse_shard
    from tools.preprocess.input.source import Selection
    from tools.preprocess.run import Options

    for name in ("cross_check", "workers"):
        if getattr(flags, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(flags, name)} is negative.")
    largest = flags.max_document_mb
    selection = Selection(
        inputs=tuple(flags.input),
        keys=tuple(flags.json_keys),
        shard=parse_shard(flags.shard),
        max_document_bytes=None if largest is None else _bytes("--max-document-mb", largest, 1e6),
        hub_config=flags.hub_config,
        hub_split=flags.hub_split,
    )
    options = Options(
        selection=selection,
        output_prefix=flags.output_prefix,
        tokenizer=flags.tokenizer,
        append_eod=flags.append_eod,
        skip_errors=flags.on_error == "skip",
        cross_check=flags.cross_check,
        part_bytes=_bytes("--commit-mib", flags.commit_mib, 2**20),
        threads=flags.workers,
        restart=flags.restart,
        overwrite=flags.overwrite,
    )
    return _make(options, as_json=flags.json)


def _bytes(flag: str, value: float, unit: float) -> int:
    if value <= 0:
        raise InputError(f"{flag} {value:g} is not positive.")
    return max(1, round(value * unit))


def _make(options: Options, as_json: bool = False) -> int:
    """Preprocess with progress on stderr and a summary on stdout."""
    from rich.console import Console

    from tools.preprocess.output.writer import Progress
    from tools.preprocess.progress import progress_on
    from tools.preprocess.run import preprocess

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    last = Progress(0)
    start = time.monotonic()
    with progress_on(console) as show:

        def watch(state: Progress) -> None:
            nonlocal last
            last = state
            show(state)

        datasets = preprocess(options, say=console.print, watch=watch)
    _print_summary(datasets, last, time.monotonic() - start, as_json)
    return 0


def _print_summary(
    datasets: Sequence[Dataset], last: Progress, seconds: float, as_json: bool
) -> None:
    from tools.preprocess.progress import describe

    if as_json:
        summary = {
            "seconds": seconds,
            "text_bytes": last.text_bytes,
            "processor_seconds": last.seconds,
            "datasets": [
                {"prefix": str(d.prefix), "documents": d.documents, "tokens": d.tokens}
                for d in datasets
            ],
        }
        print(msgspec.json.encode(summary).decode())
        return
    for dataset in datasets:
        print(_describe(dataset))
        manifest = read_manifest(dataset.prefix)
        for kind, count in (manifest.problems if manifest else {}).items():
            print(f"  {count:,} × {kind}")
    if last.text_bytes:
        spent = sum(last.seconds.values()) or 1.0
        shares = ", ".join(f"{name} {100 * s / spent:.0f}%" for name, s in last.seconds.items())
        print(f"{seconds:.1f} s · {describe(last, seconds)} · {shares}")


def _describe(dataset: Dataset) -> str:
    return f"{dataset.prefix}: {dataset.documents:,} documents, {dataset.tokens:,} tokens"


def _add_sample_flags(parser: Parser) -> None:
    parser.add_argument("--output-prefix", type=Path, default=Path("owt-ds/sample"), help="prefix")
    once = "leave out paragraphs that stood before, so that validation holds nothing of training"
    parser.add_argument("--unique", action="store_true", help=once)


def _sample(flags: Flags) -> int:
    from tools.preprocess.sample import write_sample

    prefix: Path = flags.output_prefix
    text = prefix.with_name(prefix.name + ".jsonl")
    write_sample(text, unique=flags.unique)
    return _make_plain(text, prefix)


def _add_hub_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("name", help="such as vuiseng9/openwebtext-10k")
    add("--output-prefix", type=Path, required=True, help="writes PREFIX.jsonl and the data set")
    add("--hub-config", metavar="NAME", help="of the data set")
    add("--hub-split", default="train", metavar="NAME", help="of the data set")


def _hub(flags: Flags) -> int:
    from tools.preprocess.input.hub import HubInput, fetch

    prefix: Path = flags.output_prefix
    try:
        print(
            f"{_describe(open_dataset(prefix.with_name(f'{prefix.name}_text_document')))}, made before"
        )
        return 0
    except DatasetError:
        pass
    lines = prefix.with_name(prefix.name + ".jsonl")
    if not lines.is_file():
        fetch(HubInput(flags.name, flags.hub_config, flags.hub_split), "text", lines)
    return _make_plain(lines, prefix)


def _make_plain(lines: Path, prefix: Path) -> int:
    """A file of JSON lines as GPT-2 tokens with end-of-document tokens."""
    from tools.preprocess.input.source import Selection
    from tools.preprocess.run import Options

    return _make(Options(Selection((str(lines),)), prefix, append_eod=True))


def _add_merge_flags(parser: Parser) -> None:
    parser.add_argument("prefix", type=Path, nargs="+", help="such as part-0_text_document")
    parser.add_argument("--output-prefix", type=Path, required=True, help="writes PREFIX.bin/.idx")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished data set")


def _merge(flags: Flags) -> int:
    from tools.preprocess.output.merge import merge

    dataset = merge(
        [strip_suffix(path) for path in flags.prefix],
        strip_suffix(flags.output_prefix),
        flags.overwrite,
        say=lambda sentence: print(sentence, file=sys.stderr),
    )
    print(_describe(dataset))
    return 0


def _add_verify_flags(parser: Parser) -> None:
    parser.add_argument("prefix", type=Path, nargs="+", help="such as owt-ds/sample_text_document")
    parser.add_argument("--vocabulary", type=int, help="entries; the manifest's if not given")


def _verify(flags: Flags) -> int:
    from tools.preprocess.dataset.verify import verify

    status = 0
    for path in flags.prefix:
        verdict = verify(strip_suffix(path), flags.vocabulary)
        for problem in verdict.problems:
            print(f"damaged: {problem}")
        status = max(status, int(bool(verdict.problems)))
        if not verdict.problems:
            print(f"{strip_suffix(path)}: {verdict.describe()}")
    return status


def _add_stats_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("prefix", type=Path, help="such as owt-ds/sample_text_document")
    add("--seq-length", type=int, default=1024, help="tokens of a sample")
    add("--steps", type=int, default=100, help="iterations of the run")
    add("--global-batch-size", type=int, default=32, help="samples of an iteration")
    add("--split", default="949,50,1", help="Megatron's --split")
    add("--plot", type=Path, help="the picture; PREFIX.lengths.svg if not given")
    add("--json", action="store_true", help="print as JSON, draw nothing unless --plot is given")


def _stats(flags: Flags) -> int:
    from tools.preprocess.dataset import describe
    from tools.preprocess.dataset.stats import draws, measure

    for name in ("seq_length", "steps", "global_batch_size"):
        if getattr(flags, name) < 1:
            raise PreprocessError(f"--{name.replace('_', '-')} must be at least 1.")
    prefix = strip_suffix(flags.prefix)
    dataset = open_dataset(prefix)
    stats = measure(dataset, read_manifest(prefix))
    drawn = draws(dataset, flags.split, flags.seq_length, flags.steps * flags.global_batch_size)
    plot: Path | None = flags.plot
    if plot is None and not flags.json:
        plot = prefix.with_name(prefix.name + ".lengths.svg")
    if plot is not None:
        describe.draw_histogram(stats.length_histogram, prefix.name, plot)
    if flags.json:
        print(msgspec.json.encode({"stats": stats, "draws": drawn}).decode())
        return 0
    print(*describe.describe_counts(dataset, stats), "", sep="\n")
    print(*describe.text_histogram(stats.length_histogram), "", sep="\n")
    print(*describe.describe_draws(drawn, flags.seq_length, flags.steps), sep="\n")
    print(f"picture: {plot}")
    return 0


COMMANDS = {
    "run": Command(
        "make data sets from text (also without a command)",
        "Make Megatron data sets from JSON lines, parquet or the hub; resumes where it was cut off.",
        _add_run_flags,
        _run,
    ),
    "sample": Command(
        "make the sample data set from prose that Python carries",
        "Make the sample data set: GPT-2 ids of prose that every Python carries.",
        _add_sample_flags,
        _sample,
    ),
    "hub": Command(
        "fetch a data set of the hub as JSON lines and make it",
        "Fetch a data set of the Hugging Face hub as JSON lines, then make GPT-2 ids of its key "
        "'text'; repeating it resumes. (--input hub:NAME streams instead.)",
        _add_hub_flags,
        _hub,
    ),
    "merge": Command(
        "join data sets, in order",
        "Join data sets in the order given, in bounded memory: the parts of --shard i/n, or others.",
        _add_merge_flags,
        _merge,
    ),
    "verify": Command(
        "check every byte of a data set",
        "Check every byte of a data set; exits with 1 if anything is wrong.",
        _add_verify_flags,
        _verify,
    ),
    "stats": Command(
        "describe a data set",
        "Describe a data set: counts, document lengths, and what a training run will draw from it.",
        _add_stats_flags,
        _stats,
    ),
}
