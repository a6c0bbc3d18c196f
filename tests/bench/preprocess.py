"""`make bench NAME=preprocess`: this tool, Hugging Face `tokenizers` and Megatron's script on the same file.

All tools are measured as processes from start to end. `--text unseen` generates text in eight scripts without
repeated words, which is the hardest input for an encoder that caches words.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parakit.config.setting import SettingError, parse_settings
from parakit.config.settings import MEGATRON_LM
from parakit.data.indexed import DatasetError
from tests.bench.synthetic_text import TEXTS, write_synthetic
from tools.preprocess.documents import Parser, Problem
from tools.preprocess.encoders import GigatokenEncoder
from tools.preprocess.lines import line_blocks
from tools.preprocess.pipeline import default_threads
from tools.preprocess.source import whole_file
from tools.preprocess.tokenizer import gpt2_files, load_tokenizer

Say = Callable[[str], None]

_SCRIPT = Path("tools/preprocess_data.py")
_OWN_TOKENIZER = Path("megatron/training/tokenizer/gpt2_tokenization.py")
"""Megatron's own GPT-2 tokenizer, up to 0.16."""
_CEILING_BYTES = 128 << 20
"""Bytes of text in memory on which the encoder alone is measured."""


@dataclass(frozen=True)
class Rate:
    """Rates of a process from start to end."""

    megabytes_per_second: float
    """Megabytes of input per second of wall time."""
    processor_seconds: float
    """Processor seconds of all threads and children, which remain comparable on a busy machine."""


@dataclass(frozen=True)
class ToolComparison:
    """Rates of the compared tools on a file."""

    input_bytes: int
    threads: int
    ours: tuple[Rate, ...]
    """Rate of each repetition of this tool."""
    ceiling_megabytes_per_second: float
    """Rate of gigatoken alone on texts in memory, on all cores, after a warm-up."""
    tokenizers: Rate
    megatron: Rate | None = None
    same_bytes: bool | None = None
    """True if both files equal those of Megatron's script."""

    @property
    def median(self) -> Rate:
        """Median rate of this tool, with its median processor time."""
        return Rate(
            statistics.median(rate.megabytes_per_second for rate in self.ours),
            statistics.median(rate.processor_seconds for rate in self.ours),
        )


def command_line(program: str) -> argparse.ArgumentParser:
    """Return the parser of the bench's options."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    add = parser.add_argument
    add("--input", type=Path, help="JSON lines; text is made if not given")
    add("--text", choices=tuple(TEXTS), default="english", help="which text is made")
    add("--mb", type=float, default=256, help="size of the text that is made")
    help_text = "a Megatron-LM checkout; the environment's MEGATRON_LM if not given"
    add("--megatron-lm", type=Path, help=help_text)
    add("--repeats", type=int, default=3, help="of this tool; the others run once")
    add("--json", action="store_true", help="print as JSON")
    return parser


def main(arguments: Sequence[str], program: str = "python -m tests.bench.preprocess") -> int:
    """Measure and print. Return the exit status."""
    flags = command_line(program).parse_args(arguments)
    try:
        from_environment = parse_settings((MEGATRON_LM,), os.environ)["megatron_lm"]
        checkout = flags.megatron_lm or from_environment
        if flags.mb <= 0:
            raise DatasetError(f"--mb {flags.mb:g} is not positive.")
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            source = flags.input
            if source is None:
                source = Path(name) / "text.jsonl"
                write_synthetic(source, round(flags.mb * 1e6), text=flags.text)
            comparison = compare(source, Path(name), checkout, flags.repeats, _say)
    except (DatasetError, SettingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        msgspec.json.encode(comparison).decode() if flags.json else "\n".join(describe(comparison))
    )
    return 0


def compare(
    source: Path, folder: Path, megatron: Path | None, repeats: int, say: Say
) -> ToolComparison:
    """Measure all tools on `source`. Repetitions of this tool are spread between the others.

    Raises:
        DatasetError: A program fails.
    """
    if megatron is not None and not (megatron / _SCRIPT).is_file():
        raise DatasetError(f"MEGATRON_LM={megatron} holds no {_SCRIPT}.")
    if megatron is not None and not (megatron / _OWN_TOKENIZER).is_file():
        _require_transformers(megatron)
    ours: list[Rate] = []

    def measure_ours() -> None:
        rate = _run_ours(source, folder)
        ours.append(rate)
        say(f"this tool: {rate.megabytes_per_second:.1f} MB/s")

    measure_ours()
    tokenizers = _run_tokenizers(source, folder)
    say(f"Hugging Face tokenizers: {tokenizers.megabytes_per_second:.1f} MB/s")
    measure_ours()
    megatron_rate = same = None
    if megatron is not None:
        megatron_rate = _run_megatron(source, folder, megatron)
        say(f"Megatron's preprocess_data.py: {megatron_rate.megabytes_per_second:.1f} MB/s")
        same = _same(folder / "ours_text_document", folder / "megatron_text_document")
    while len(ours) < repeats:
        measure_ours()
    return ToolComparison(
        input_bytes=source.stat().st_size,
        threads=default_threads(),
        ours=tuple(ours),
        ceiling_megabytes_per_second=_ceiling(source),
        tokenizers=tokenizers,
        megatron=megatron_rate,
        same_bytes=same,
    )


def _require_transformers(megatron: Path) -> None:
    # Without transformers the workers of the script exit, and its pool starts new workers forever.
    if importlib.util.find_spec("transformers") is None:
        raise DatasetError(
            f"MEGATRON_LM={megatron} reads GPT-2's tokenizer with the package transformers, which is "
            "not installed; install it, or name a checkout of 0.16 or before, which needs none."
        )


def describe(comparison: ToolComparison) -> Iterator[str]:
    """Yield the rates as lines of text."""
    ours = comparison.median
    rates = [rate.megabytes_per_second for rate in comparison.ours]
    yield f"{comparison.input_bytes / 1e6:,.0f} MB of JSON lines, {comparison.threads} cores, whole processes:"
    yield f"{_line('this tool', ours)}  median of {len(rates)}, {min(rates):.1f} to {max(rates):.1f}"
    yield f"{_line('Hugging Face tokenizers', comparison.tokenizers)}  {_ratio(ours, comparison.tokenizers)}"
    if comparison.megatron is None:
        yield "  preprocess_data.py        not measured: set MEGATRON_LM to a Megatron-LM checkout"
    else:
        same = "same bytes" if comparison.same_bytes else "DIFFERENT bytes"
        ratio = _ratio(ours, comparison.megatron)
        yield f"{_line('preprocess_data.py', comparison.megatron)}  {ratio}, {same}"
    ceiling = comparison.ceiling_megabytes_per_second
    share = ours.megabytes_per_second / ceiling
    yield f"  gigatoken alone, in memory: {ceiling:.1f} MB/s; {share:.0%} of it reached end to end"


def _run_ours(source: Path, folder: Path) -> Rate:
    arguments = ["-m", "tools.preprocess", "--input", str(source), "--append-eod", "--overwrite"]
    arguments += ["--output-prefix", str(folder / "ours")]
    return _run([sys.executable, *arguments], source)


def _run_tokenizers(source: Path, folder: Path) -> Rate:
    module = "tests.bench.tokenizers_baseline"
    target = folder / "tokenizers.bin"
    return _run([sys.executable, "-m", module, str(source), str(target)], source)


def _run_megatron(source: Path, folder: Path, checkout: Path) -> Rate:
    vocabulary, merges = map(str, gpt2_files())
    arguments = ["--input", str(source), "--output-prefix", str(folder / "megatron")]
    arguments += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    arguments += ["--vocab-file", vocabulary, "--merge-file", merges]
    arguments += ["--workers", str(default_threads())]
    script = checkout / _SCRIPT
    # The checkout has to come before the installed megatron-core.
    environment = {"PYTHONPATH": str(checkout)}
    return _run([sys.executable, str(script), *arguments], source, environment)


def _run(
    command: Sequence[str], source: Path, environment: Mapping[str, str] | None = None
) -> Rate:
    """Run to the end."""
    before = _children_seconds()
    start = time.monotonic()
    run = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    wall = time.monotonic() - start
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise DatasetError(f"'{' '.join(command[:3])} …' failed: {last}")
    return Rate(source.stat().st_size / 1e6 / wall, _children_seconds() - before)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _same(ours: Path, megatron_output: Path) -> bool:
    return all(
        subprocess.run(
            ["cmp", "-s", f"{ours}{suffix}", f"{megatron_output}{suffix}"], check=False
        ).returncode
        == 0
        for suffix in (".bin", ".idx")
    )


def _ceiling(source: Path) -> float:
    """Return the rate of the fastest of three passes. The first pass also fills heap and cache."""
    encoder = GigatokenEncoder(load_tokenizer("gpt2"))
    blocks = list(_texts(source))
    size = sum(size for size, _ in blocks)
    rates = []
    for _ in range(3):
        start = time.monotonic()
        with ThreadPoolExecutor(default_threads()) as pool:
            list(pool.map(encoder.encode, [texts for _, texts in blocks]))
        rates.append(size / 1e6 / (time.monotonic() - start))
    return max(rates)


def _texts(path: Path) -> Iterable[tuple[int, list[str]]]:
    parser, held = Parser(["text"]), 0
    for block in line_blocks(whole_file(path), 0, None):
        rows = parser.parse(block.content)
        texts = [row[0] for row in rows if not isinstance(row, Problem) and isinstance(row[0], str)]
        yield block.size_bytes, texts
        held += block.size_bytes
        if held >= _CEILING_BYTES:
            return


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _line(name: str, rate: Rate) -> str:
    return (
        f"  {name:25} {rate.megabytes_per_second:7.1f} MB/s {rate.processor_seconds:8.1f} s of "
        "processor time"
    )


def _ratio(ours: Rate, other: Rate) -> str:
    by_clock = ours.megabytes_per_second / other.megabytes_per_second
    by_processor = other.processor_seconds / ours.processor_seconds
    return f"this tool is {by_clock:.1f} times as fast ({by_processor:.1f} by processor time)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
