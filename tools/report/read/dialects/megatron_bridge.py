"""Megatron-Bridge: Megatron's line; memory in GB, the rate in a line of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.report.read.dialects import Dialect, News
from tools.report.read.dialects.megatron import BarLine
from tools.report.read.dialects.megatron_news import MEMORY_OF_RANK, NUMBER, is_possible
from tools.report.read.iterations import Iteration
from tools.report.read.scraped import Fact, MemoryReading, NumbersAhead

_GIGABYTES = re.compile(
    rf"{MEMORY_OF_RANK}\(GB\) \|((?: mem-[a-z-]{{1,40}}: [\d.]{{1,20}} ?(?:\||(?=\s|\Z))){{1,40}})"
)
_SIZES = tuple(
    re.compile(rf" mem-{name}-gigabytes: {NUMBER}(?= ?\||\s|\Z)")
    for name in ("allocated", "max-allocated", "reserved", "max-reserved")
)
_MIB_A_GIGABYTE = 1e9 / 2**20
_STEP_TIME = re.compile(
    r"Step Time : (\d{1,6}\.\d{1,6})s GPU utilization: (\d{1,6}\.\d{1,4})MODEL_TFLOP/s/GPU"
)
_STEP_TIME_ROUNDING = 0.0051
"""Seconds; the time has two decimals there."""


def _memory(line: str) -> Iterator[Fact]:
    """In units of 10**9 bytes."""
    for m in _GIGABYTES.finditer(line):
        found = [size.search(m[3]) for size in _SIZES]
        sizes = [float(size[1]) * _MIB_A_GIGABYTE for size in found if size]
        if len(sizes) == len(_SIZES):
            reading = MemoryReading(int(m[1]), int(m[2]) if m[2] else None, *sizes)
            if is_possible(reading):
                yield reading


def _rate(line: str) -> Iterator[Fact]:
    """Before an iteration's line, with the same time."""
    if m := _STEP_TIME.search(line):
        seconds = float(m[1])

        def belongs(found: Iteration) -> bool:
            apart = (found.elapsed_ms or 0.0) / 1000 - seconds
            return bool(seconds) and abs(apart) <= _STEP_TIME_ROUNDING

        yield NumbersAhead({"throughput_tflops_per_gpu": float(m[2])}, belongs)


DIALECT = Dialect(
    name="Megatron-Bridge", line=BarLine, news=(News("(GB)", _memory), News("Step Time", _rate))
)
