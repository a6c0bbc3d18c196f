"""Rates of this tool and of others on one file, as whole processes, measured in one run."""

from __future__ import annotations

import os
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

_CEILING_BYTES = 128 << 20
"""Text held in memory to see how fast the encoder is with nothing around it."""


@dataclass(frozen=True)
class Comparison:
    """Rates in MB/s of input, as whole processes."""

    input_bytes: int
    threads: int
    ours: tuple[float, ...]
    """Each repetition."""
    shares: dict[str, float]
    """Of this tool's processor time, by stage."""
    ceiling: float
    """gigatoken alone on texts in memory, on all cores."""
    tokenizers: float
    megatron: float | None = None
    same_bytes: bool | None = None
    """Whether both files equal those of Megatron's script."""

    @property
    def median(self) -> float:
        """This tool's median rate."""
        return statistics.median(self.ours)


def compare(
    source: Path, folder: Path, megatron: Path | None, repeats: int, say: Say
) -> Comparison:
    """Measure everything on `source`, the repetitions of this tool spread between the others.

    Raises:
        PreprocessError: One of the programs fails.
    """
    size = source.stat().st_size
    ours: list[float] = []
    seconds: dict[str, float] = {}

    def measure_ours() -> None:
        summary = _run_ours(source, folder)
        ours.append(size / 1e6 / summary.wall_seconds)
        seconds.update(summary.processor_seconds)
        say(f"this tool: {ours[-1]:.1f} MB/s")

    measure_ours()
    tokenizers = size / 1e6 / _run_tokenizers(source, folder)
    say(f"Hugging Face tokenizers: {tokenizers:.1f} MB/s")
    measure_ours()
    theirs = same = None
    if megatron is not None:
        theirs = size / 1e6 / _run_megatron(source, folder, megatron)
        say(f"Megatron's preprocess_data.py: {theirs:.1f} MB/s")
        same = _same(folder / "ours_text_document", folder / "megatron_text_document")
    while len(ours) < repeats:
        measure_ours()
    spent = sum(seconds.values())
    return Comparison(
        input_bytes=size,
        threads=default_threads(),
        ours=tuple(ours),
        shares={name: value / spent for name, value in seconds.items()},
        ceiling=_ceiling(source),
        tokenizers=tokenizers,
        megatron=theirs,
        same_bytes=same,
    )


@dataclass(frozen=True)
class _Summary:
    wall_seconds: float
    processor_seconds: dict[str, float]


def _run_ours(source: Path, folder: Path) -> _Summary:
    arguments = ["-m", "tools.preprocess", "--input", str(source), "--append-eod", "--overwrite"]
    arguments += ["--output-prefix", str(folder / "ours"), "--json"]
    start = time.monotonic()
    printed = _run([sys.executable, *arguments])
    wall = time.monotonic() - start
    return _Summary(wall, msgspec.json.decode(printed)["processor_seconds"])


def _run_tokenizers(source: Path, folder: Path) -> float:
    module = "tools.preprocess.bench_tokenizers"
    start = time.monotonic()
    _run([sys.executable, "-m", module, str(source), str(folder / "tokenizers.bin")])
    return time.monotonic() - start


def _run_megatron(source: Path, folder: Path, checkout: Path) -> float:
    script = checkout / "tools" / "preprocess_data.py"
    if not script.is_file():
        raise PreprocessError(f"MEGATRON_LM={checkout} holds no tools/preprocess_data.py.")
    vocabulary, merges = map(str, gpt2_files())
    arguments = ["--input", str(source), "--output-prefix", str(folder / "megatron")]
    arguments += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    arguments += ["--vocab-file", vocabulary, "--merge-file", merges]
    arguments += ["--workers", str(default_threads())]
    start = time.monotonic()
    # The checkout has to come before the installed megatron-core.
    _run([sys.executable, str(script), *arguments], {"PYTHONPATH": str(checkout)})
    return time.monotonic() - start


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    run = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise PreprocessError(f"'{' '.join(command[:3])} …' failed: {last}")
    return run.stdout


def _same(ours: Path, theirs: Path) -> bool:
    return all(
        subprocess.run(
            ["cmp", "-s", f"{ours}{suffix}", f"{theirs}{suffix}"], check=False
        ).returncode
        == 0
        for suffix in (".bin", ".idx")
    )


def _ceiling(source: Path) -> float:
    encoder = GigatokenEncoder(load_tokenizer("gpt2"))
    blocks = list(_texts(source))
    size = sum(size for size, _ in blocks)
    start = time.monotonic()
    with ThreadPoolExecutor(default_threads()) as pool:
        list(pool.map(encoder.encode, [texts for _, texts in blocks]))
    return size / 1e6 / (time.monotonic() - start)


def _texts(path: Path) -> Iterable[tuple[int, list[str]]]:
    source = open_source(Selection((str(path),)))
    held = 0
    for _, block in source.blocks(0, 0):
        texts = [text for text in source.parse(block).columns[0] if isinstance(text, str)]
        yield block.size_bytes, texts
        held += block.size_bytes
        if held >= _CEILING_BYTES:
            return
