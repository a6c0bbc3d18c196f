"""Dialect of NeMo 2: Megatron's line with other names."""

from __future__ import annotations

from parakit.logs.dialects import Dialect
from parakit.logs.dialects.megatron import BarLine

DIALECT = Dialect(
    name="NeMo 2",
    line=BarLine,
    names={
        "train_step_timing in s": ("elapsed_ms", 3),
        "TFLOPS_per_GPU": ("throughput_tflops_per_gpu", 0),
        "lr": ("learning_rate", 0),
        "reduced_train_loss": ("lm_loss", 0),
    },
)
