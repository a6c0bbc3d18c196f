"""Dialect of Megatron-Bridge: Megatron's line, memory in GB, and the throughput in a separate line."""

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
_MIB_PER_GIGABYTE = 1e9 / 2**20
_STEP_TIME = (
    r"Step Time : (\d{1,6}\.\d{1,6})s GPU utilization: (\d{1,6}\.\d{1,4})(?:MODEL_)?TFLOP/s/GPU"
)
"""Pattern of step time and throughput. The first versions (2025) print TFLOP/s, later ones MODEL_TFLOP/s."""
_STEP_TIME_ROUNDING = 0.0051
"""Largest rounding error of the step time in seconds, which is printed with two decimals."""


def _read_memory(line: re.Match[str]) -> MemoryReading | None:
    """Return the memory of a rank, printed in units of 10**9 bytes; None if a size is missing."""
    matches = [pattern.search(line[3]) for pattern in _SIZES]
    sizes = [float(match[1]) * _MIB_PER_GIGABYTE for match in matches if match]
    return make_memory_reading(line[1], line[2], sizes) if len(sizes) == len(_SIZES) else None


def _read_throughput(step: re.Match[str]) -> NumbersAhead:
    """Return the throughput of a step, to be added to the next iteration line if that has the same time."""
    seconds, throughput = float(step[1]), float(step[2])

    def complete(line: ParsedIteration, *_: object) -> Iteration:
        iteration = line.iteration
        difference = (iteration.elapsed_ms or 0.0) / 1000 - seconds
        is_same_step = bool(seconds) and abs(difference) <= _STEP_TIME_ROUNDING
        if iteration.throughput_tflops_per_gpu or not is_same_step:
            return iteration
        return msgspec.structs.replace(iteration, throughput_tflops_per_gpu=throughput)

    return NumbersAhead(complete)


DIALECT = Dialect(
    name="Megatron-Bridge",
    line=BarLine,
    events=(
        EventReader("(GB)", read_every_match(_GIGABYTES, _read_memory)),
        EventReader("Step Time", read_first_match(_STEP_TIME, _read_throughput)),
    ),
)
