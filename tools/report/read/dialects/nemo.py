"""NeMo 2: Megatron's line with names of its own."""

from __future__ import annotations

from tools.report.read.dialects import Dialect
from tools.report.read.dialects.megatron import BarLine

DIALECT = Dialect(
    name="NeMo 2",
    line=BarLine,
    names=(
        ("elapsed_ms", 3, ("train_step_timing in s",)),
        ("throughput_tflops_per_gpu", 0, ("TFLOPS_per_GPU",)),
        ("learning_rate", 0, ("lr",)),
        ("lm_loss", 0, ("reduced_train_loss",)),
    ),
)
