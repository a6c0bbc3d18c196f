"""Make Megatron data sets from JSON lines, parquet or the hub; resumes where it was cut off."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from tools.preprocess.dataset import Dataset
from tools.preprocess.errors import InputError
from tools.preprocess.filling import Progress
from tools.preprocess.job import CROSS_CHECK, SHARD_BYTES, Options, preprocess
from tools.preprocess.manifest import read_manifest
from tools.preprocess.parts import parse_part
from tools.preprocess.progress import describe, progress_on
from tools.preprocess.source import Selection


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
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
    add(
        "--cross-check",
        type=int,
        default=CROSS_CHECK,
        metavar="N",
        help="documents encoded by Hugging Face tokenizers too, and compared",
    )
    add("--max-document-mb", type=float, metavar="MB", help="refuse documents larger than this")
    add(
        "--commit-mib",
        type=float,
        default=SHARD_BYTES / 2**20,
        metavar="MIB",
        help="input between two commits that a resumed run can go on from",
    )
    add("--workers", type=int, default=0, metavar="N", help="threads; 0 is one for each core")
    add("--hub-config", metavar="NAME", help="of hub:NAME")
    add("--hub-split", default="train", metavar="NAME", help="of hub:NAME")
    add("--restart", action="store_true", help="drop what an unfinished run has left")
    add("--overwrite", action="store_true", help="replace a finished data set")
    add("--json", action="store_true", help="print the summary as JSON")


def run(flags: argparse.Namespace) -> int:
    """Carry it out."""
    for name in ("cross_check", "workers"):
        if getattr(flags, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(flags, name)} is negative.")
    options = Options(
        selection=_selection(flags),
        output_prefix=flags.output_prefix,
        tokenizer=flags.tokenizer,
        append_eod=flags.append_eod,
        skip_errors=flags.on_error == "skip",
        cross_check=flags.cross_check,
        shard_bytes=_bytes("--commit-mib", flags.commit_mib, 2**20) or SHARD_BYTES,
        threads=flags.workers,
        restart=flags.restart,
        overwrite=flags.overwrite,
    )
    return make(options, as_json=flags.json)


def make(options: Options, as_json: bool = False) -> int:
    """Preprocess with progress on stderr and a summary on stdout."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    last = Progress(0)
    start = time.monotonic()
    with progress_on(console) as show:

        def watch(state: Progress) -> None:
            nonlocal last
            last = state
            show(state)

        datasets = preprocess(options, say=console.print, watch=watch)
    seconds = time.monotonic() - start
    if as_json:
        print(_json(datasets, last, seconds))
    else:
        _print(datasets, last, seconds)
    return 0


def _selection(flags: argparse.Namespace) -> Selection:
    return Selection(
        inputs=tuple(flags.input),
        keys=tuple(flags.json_keys),
        part=parse_part(flags.shard),
        max_document_bytes=_bytes("--max-document-mb", flags.max_document_mb, 1e6),
        hub_config=flags.hub_config,
        hub_split=flags.hub_split,
    )


def _print(datasets: Sequence[Dataset], last: Progress, seconds: float) -> None:
    for dataset in datasets:
        print(f"{dataset.prefix}: {dataset.documents:,} documents, {dataset.tokens:,} tokens")
        manifest = read_manifest(dataset.prefix)
        for kind, count in (manifest.problems if manifest else {}).items():
            print(f"  {count:,} × {kind}")
    if last.text_bytes:
        spent = sum(last.seconds.values()) or 1.0
        shares = ", ".join(f"{name} {100 * s / spent:.0f}%" for name, s in last.seconds.items())
        print(f"{seconds:.1f} s · {describe(last, seconds)} · {shares}")


def _json(datasets: Sequence[Dataset], last: Progress, seconds: float) -> str:
    summary = {
        "seconds": seconds,
        "text_bytes": last.text_bytes,
        "processor_seconds": last.seconds,
        "datasets": [
            {"prefix": str(d.prefix), "documents": d.documents, "tokens": d.tokens}
            for d in datasets
        ],
    }
    return msgspec.json.encode(summary).decode()


def _bytes(flag: str, value: float | None, unit: float) -> int | None:
    if value is not None and value <= 0:
        raise InputError(f"{flag} {value:g} is not positive.")
    return None if value is None else max(1, round(value * unit))
