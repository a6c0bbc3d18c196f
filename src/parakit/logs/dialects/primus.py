"""Dialect of Primus: Megatron's line, with the mean so far after a number."""

from __future__ import annotations

from parakit.logs.dialects import Dialect
from parakit.logs.dialects.megatron import BarLine

DIALECT = Dialect(
    name="Primus",
    line=BarLine,
    names={"compute per GPU (TFLOP/s/GPU)": ("throughput_tflops_per_gpu", 0)},
)
