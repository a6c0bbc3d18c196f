"""Measure this tool against Hugging Face tokenizers and, given a checkout, Megatron's script."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.preprocess.bench import Comparison, Rate, compare
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
    print(msgspec.json.encode(found).decode() if flags.json else "\n".join(describe(found)))
    return 0


def describe(found: Comparison) -> Iterator[str]:
    """The figures as lines for people."""
    ours = found.median
    rates = [rate.megabytes_per_second for rate in found.ours]
    yield f"{found.input_bytes / 1e6:,.0f} MB of JSON lines, {found.threads} cores, whole processes:"
    yield f"{_line('this tool', ours)}  median of {len(rates)}, {min(rates):.1f} to {max(rates):.1f}"
    yield f"{_line('Hugging Face tokenizers', found.tokenizers)}  {_ratio(ours, found.tokenizers)}"
    if found.megatron is None:
        yield "  preprocess_data.py        not measured: set MEGATRON_LM to a Megatron-LM checkout"
    else:
        same = "same bytes" if found.same_bytes else "DIFFERENT bytes"
        ratio = _ratio(ours, found.megatron)
        yield f"{_line('preprocess_data.py', found.megatron)}  {ratio}, {same}"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items())
    yield f"  this tool's processor time: {shares}"
    ceiling = found.ceiling_megabytes_per_second
    share = ours.megabytes_per_second / ceiling
    yield f"  gigatoken alone, in memory: {ceiling:.1f} MB/s; {share:.0%} of it reached end to end"


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _line(name: str, rate: Rate) -> str:
    return (
        f"  {name:25} {rate.megabytes_per_second:7.1f} MB/s {rate.processor_seconds:8.1f} s of "
        "processor time"
    )


def _ratio(ours: Rate, theirs: Rate) -> str:
    by_clock = ours.megabytes_per_second / theirs.megabytes_per_second
    by_processor = theirs.processor_seconds / ours.processor_seconds
    return f"this tool is {by_clock:.1f} times as fast ({by_processor:.1f} by processor time)"
