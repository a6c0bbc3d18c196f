"""Rates of this tool and of others on one file, as whole processes, measured in one run."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.preprocess.encoders import GigatokenEncoder, Say
from tools.preprocess.errors import PreprocessError
from tools.preprocess.pipeline import default_threads
from tools.preprocess.source import Selection, open_source
from tools.preprocess.tokenizer import gpt2_files, load_tokenizer

_SCRIPT = Path("tools/preprocess_data.py")
_CEILING_BYTES = 128 << 20
"""Text held in memory to see how fast the encoder is with nothing around it."""


@dataclass(frozen=True)
class Rate:
    """One whole process."""

    megabytes_per_second: float
    """Of input, by the clock."""
    processor_seconds: float
    """Of all its threads and children: what is left of a comparison on a busy machine."""


@dataclass(frozen=True)
class Comparison:
    """Rates on one file, as whole processes."""

    input_bytes: int
    threads: int
    ours: tuple[Rate, ...]
    """Each repetition."""
    shares: dict[str, float]
    """Of this tool's processor time, by stage."""
    ceiling_megabytes_per_second: float
    """gigatoken alone on texts in memory, on all cores, warm."""
    tokenizers: Rate
    megatron: Rate | None = None
    same_bytes: bool | None = None
    """Whether both files equal those of Megatron's script."""

    @property
    def median(self) -> Rate:
        """This tool's median rate, and its median processor time."""
        return Rate(
            statistics.median(rate.megabytes_per_second for rate in self.ours),
            statistics.median(rate.processor_seconds for rate in self.ours),
        )


def compare(
    source: Path, folder: Path, megatron: Path | None, repeats: int, say: Say
) -> Comparison:
    """Measure everything on `source`, the repetitions of this tool spread between the others.

    Raises:
        PreprocessError: One of the programs fails.
    """
    if megatron is not None and not (megatron / _SCRIPT).is_file():
        raise PreprocessError(f"MEGATRON_LM={megatron} holds no {_SCRIPT}.")
    ours: list[Rate] = []
    shares: dict[str, float] = {}

    def measure_ours() -> None:
        rate, shares_now = _run_ours(source, folder)
        ours.append(rate)
        shares.update(shares_now)
        say(f"this tool: {rate.megabytes_per_second:.1f} MB/s")

    measure_ours()
    tokenizers = _run_tokenizers(source, folder)
    say(f"Hugging Face tokenizers: {tokenizers.megabytes_per_second:.1f} MB/s")
    measure_ours()
    theirs = same = None
    if megatron is not None:
        theirs = _run_megatron(source, folder, megatron)
        say(f"Megatron's preprocess_data.py: {theirs.megabytes_per_second:.1f} MB/s")
        same = _same(folder / "ours_text_document", folder / "megatron_text_document")
    while len(ours) < repeats:
        measure_ours()
    return Comparison(
        input_bytes=source.stat().st_size,
        threads=default_threads(),
        ours=tuple(ours),
        shares=shares,
        ceiling_megabytes_per_second=_ceiling(source),
        tokenizers=tokenizers,
        megatron=theirs,
        same_bytes=same,
    )


def _run_ours(source: Path, folder: Path) -> tuple[Rate, dict[str, float]]:
    """The rate, and the stages' shares of the processor time."""
    arguments = ["-m", "tools.preprocess", "--input", str(source), "--append-eod", "--overwrite"]
    arguments += ["--output-prefix", str(folder / "ours"), "--json"]
    rate, printed = _run([sys.executable, *arguments], source)
    seconds: dict[str, float] = msgspec.json.decode(printed)["processor_seconds"]
    return rate, {name: value / sum(seconds.values()) for name, value in seconds.items()}


def _run_tokenizers(source: Path, folder: Path) -> Rate:
    module = "tools.preprocess.bench_tokenizers"
    target = folder / "tokenizers.bin"
    return _run([sys.executable, "-m", module, str(source), str(target)], source)[0]


def _run_megatron(source: Path, folder: Path, checkout: Path) -> Rate:
    vocabulary, merges = map(str, gpt2_files())
    arguments = ["--input", str(source), "--output-prefix", str(folder / "megatron")]
    arguments += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    arguments += ["--vocab-file", vocabulary, "--merge-file", merges]
    arguments += ["--workers", str(default_threads())]
    script = checkout / _SCRIPT
    # The checkout has to come before the installed megatron-core.
    environment = {"PYTHONPATH": str(checkout)}
    return _run([sys.executable, str(script), *arguments], source, environment)[0]


def _run(
    command: Sequence[str], source: Path, environment: Mapping[str, str] | None = None
) -> tuple[Rate, str]:
    """Run to the end; the rate, and what was printed."""
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
        raise PreprocessError(f"'{' '.join(command[:3])} …' failed: {last}")
    rate = Rate(source.stat().st_size / 1e6 / wall, _children_seconds() - before)
    return rate, run.stdout


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _same(ours: Path, theirs: Path) -> bool:
    return all(
        subprocess.run(
            ["cmp", "-s", f"{ours}{suffix}", f"{theirs}{suffix}"], check=False
        ).returncode
        == 0
        for suffix in (".bin", ".idx")
    )


def _ceiling(source: Path) -> float:
    """The fastest of three passes: the first one also pays for a fresh heap and an empty cache."""
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
    source = open_source(Selection((str(path),)))
    held = 0
    for _, block in source.blocks(0, 0):
        texts = [text for text in source.parse(block).columns[0] if isinstance(text, str)]
        yield block.size_bytes, texts
        held += block.size_bytes
        if held >= _CEILING_BYTES:
            return
