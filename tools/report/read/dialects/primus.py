"""Primus: Megatron's line; behind a number it has the mean so far."""

from __future__ import annotations

from tools.report.read.dialects import Dialect
from tools.report.read.dialects.megatron import BarLine

DIALECT = Dialect(
    name="Primus",
    line=BarLine,
    names={"compute per GPU (TFLOP/s/GPU)": ("throughput_tflops_per_gpu", 0)},
)
