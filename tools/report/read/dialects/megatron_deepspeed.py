"""Megatron-DeepSpeed and BigScience: Megatron's line, also in seconds; DeepSpeed's configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.report.read.dialects import Dialect, News
from tools.report.read.dialects.megatron import BarLine
from tools.report.read.scraped import Fact, MoreArgument

_STAGE = "zero_optimization_stage"
_ZERO_STAGE = re.compile(rf"{_STAGE} \.{{1,40}} ([0-3])\b")


def _zero_stage(line: str) -> Iterator[Fact]:
    """In DeepSpeed's list of its configuration, which is none of arguments."""
    if m := _ZERO_STAGE.search(line):
        yield MoreArgument(_STAGE, m[1])


DIALECT = Dialect(
    name="Megatron-DeepSpeed",
    line=BarLine,
    names=(
        ("elapsed_ms", 3, ("elapsed time per iteration (s)",)),
        ("throughput_tflops_per_gpu", 0, ("TFLOPs",)),
    ),
    news=(News(_STAGE, _zero_stage),),
)
