"""Megatron-Bridge: Megatron's line; memory in GB, the rate in a line of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from tools.report.read.dialects import Dialect, FoundIteration, News
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
        seconds, rate = float(m[1]), float(m[2])

        def complete(line: FoundIteration, _: Mapping[str, str]) -> Iteration:
            found = line.iteration
            apart = (found.elapsed_ms or 0.0) / 1000 - seconds
            if found.throughput_tflops_per_gpu or not seconds or abs(apart) > _STEP_TIME_ROUNDING:
                return found
            return msgspec.structs.replace(found, throughput_tflops_per_gpu=rate)

        yield NumbersAhead(complete)


DIALECT = Dialect(
    name="Megatron-Bridge", line=BarLine, news=(News("(GB)", _memory), News("Step Time", _rate))
)
