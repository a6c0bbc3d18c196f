"""Measure this tool against Hugging Face tokenizers and, given a checkout, Megatron's script."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.preprocess.bench import Comparison, compare
from tools.preprocess.english import write_english
from tools.preprocess.errors import PreprocessError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add = parser.add_argument
    add("--input", type=Path, help="JSON lines; English-like text is made if not given")
    add("--mb", type=float, default=256, help="size of the text that is made")
    add(
        "--megatron-lm",
        type=Path,
        default=os.environ.get("MEGATRON_LM") or None,
        help="a Megatron-LM checkout; the environment's MEGATRON_LM if not given",
    )
    add("--repeats", type=int, default=3, help="of this tool; the others run once")
    add("--json", action="store_true", help="print as JSON")


def run(flags: argparse.Namespace) -> int:
    """Carry it out."""
    if flags.mb <= 0:
        raise PreprocessError(f"--mb {flags.mb:g} is not positive.")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        source: Path | None = flags.input
        if source is None:
            source = folder / "english.jsonl"
            write_english(source, round(flags.mb * 1e6))
        found = compare(source, folder, flags.megatron_lm, flags.repeats, _say)
    print(msgspec.json.encode(found).decode() if flags.json else "\n".join(_describe(found)))
    return 0


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _describe(found: Comparison) -> Iterator[str]:
    ours = found.median
    yield f"{found.input_bytes / 1e6:,.0f} MB of JSON lines, {found.threads} cores, whole processes:"
    spread = f"{min(found.ours):.1f} to {max(found.ours):.1f}"
    yield f"  this tool                 {ours:8.1f} MB/s  (median of {len(found.ours)}, {spread})"
    yield (
        f"  Hugging Face tokenizers   {found.tokenizers:8.1f} MB/s  "
        f"this tool is {ours / found.tokenizers:.1f} times as fast"
    )
    if found.megatron is not None:
        yield (
            f"  preprocess_data.py        {found.megatron:8.1f} MB/s  "
            f"this tool is {ours / found.megatron:.1f} times as fast; "
            f"{'same' if found.same_bytes else 'DIFFERENT'} bytes"
        )
    else:
        yield "  preprocess_data.py        not measured: set MEGATRON_LM to a Megatron-LM checkout"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items())
    yield f"  processor time: {shares}"
    yield (
        f"  gigatoken alone, in memory {found.ceiling:7.1f} MB/s: "
        f"{ours / found.ceiling:.0%} of it is reached end to end"
    )
