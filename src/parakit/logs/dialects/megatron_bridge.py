"""Megatron-Bridge: Megatron's line; memory in GB, the rate in a line of its own."""

from __future__ import annotations

import re

import msgspec

from parakit.logs.dialects import (
    Dialect,
    EventReader,
    ParsedIteration,
    read_every_match,
    read_first_match,
)
from parakit.logs.dialects.megatron import MEMORY_OF_RANK, NUMBER, BarLine, make_memory_reading
from parakit.logs.iterations import Iteration
from parakit.logs.scraped import MemoryReading, NumbersAhead

_GIGABYTES = (
    rf"{MEMORY_OF_RANK}\(GB\) \|((?: mem-[a-z-]{{1,40}}: [\d.]{{1,20}} ?(?:\||(?=\s|\Z))){{1,40}})"
)
_SIZES = tuple(
    re.compile(rf" mem-{name}-gigabytes: {NUMBER}(?= ?\||\s|\Z)")
    for name in ("allocated", "max-allocated", "reserved", "max-reserved")
)
_MIB_A_GIGABYTE = 1e9 / 2**20
_STEP_TIME = r"Step Time : (\d{1,6}\.\d{1,6})s GPU utilization: (\d{1,6}\.\d{1,4})MODEL_TFLOP/s/GPU"
_STEP_TIME_ROUNDING = 0.0051
"""Seconds; the time has two decimals there."""


def _memory(m: re.Match[str]) -> MemoryReading | None:
    """In units of 10**9 bytes."""
    found = [size.search(m[3]) for size in _SIZES]
    sizes = [float(size[1]) * _MIB_A_GIGABYTE for size in found if size]
    return make_memory_reading(m[1], m[2], sizes) if len(sizes) == len(_SIZES) else None


def _rate(m: re.Match[str]) -> NumbersAhead:
    """Before an iteration's line, with the same time."""
    seconds, rate = float(m[1]), float(m[2])

    def complete(line: ParsedIteration, *_: object) -> Iteration:
        found = line.iteration
        apart = (found.elapsed_ms or 0.0) / 1000 - seconds
        if found.throughput_tflops_per_gpu or not seconds or abs(apart) > _STEP_TIME_ROUNDING:
            return found
        return msgspec.structs.replace(found, throughput_tflops_per_gpu=rate)

    return NumbersAhead(complete)


DIALECT = Dialect(
    name="Megatron-Bridge",
    line=BarLine,
    events=(
        EventReader("(GB)", read_every_match(_GIGABYTES, _memory)),
        EventReader("Step Time", read_first_match(_STEP_TIME, _rate)),
    ),
)
