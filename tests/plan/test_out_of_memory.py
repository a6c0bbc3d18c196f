"""Published runs on 384 A100 of 80 GB that went out of memory, and that ran.

bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md@053adafee8, tables of 02-25 and
02-28: Megatron-DeepSpeed, ZeRO-1, full recomputation, 2,048 tokens, a vocabulary of 250,880.
"""

import pytest

from tools.plan.memory import fullest_rank
from tools.plan.search import MEMORY_RESERVE
from tools.spec.hardware import device_by_key
from tools.spec.model import ModelShape
from tools.spec.run import Recompute, RunSpec
from tools.spec.stages import EVEN, SPREAD
from tools.spec.strategy import Batch, Parallelism, Sharding

HIDDEN_LAYERS = {"181b": (14336, 72), "184b": (12288, 100), "206b": (14336, 82)}
BF16_OPTIMIZER = pytest.mark.xfail(
    strict=True,
    reason="DeepSpeed's BF16_Optimizer keeps bf16 gradients beside fp32 ones, and more than is known",
)


def fits(
    model: str, dtype: str, tensor: int, pipeline: int, data: int, samples: int, batch: int
) -> bool:
    hidden, layers = HIDDEN_LAYERS[model]
    shape = ModelShape(layers, hidden, 64, 64, hidden // 64, 4 * hidden, 2048, 2048, 250880)
    spec = RunSpec(
        shape,
        Parallelism(data=data, tensor=tensor, pipeline=pipeline, sharding=Sharding.ZERO1),
        Batch(samples, batch),
        dtype,
        recompute=Recompute.FULL,
        fused_attention=False,
        stages=SPREAD if layers % pipeline else EVEN,
    )
    capacity = device_by_key("a100").memory_bytes * (1 - MEMORY_RESERVE)
    return fullest_rank(spec)[1].total <= capacity


@pytest.mark.parametrize(
    ("model", "dtype", "tensor", "pipeline", "data", "samples", "batch"),
    [
        ("181b", "fp16", 8, 1, 48, 1, 2016),
        ("181b", "fp16", 2, 6, 32, 2, 2048),
        ("181b", "fp16", 2, 6, 32, 1, 2048),
        pytest.param("184b", "bf16", 4, 6, 16, 2, 2048, marks=BF16_OPTIMIZER),
        pytest.param("184b", "bf16", 4, 6, 16, 1, 2048, marks=BF16_OPTIMIZER),
        pytest.param("206b", "bf16", 4, 12, 8, 2, 2048, marks=BF16_OPTIMIZER),
    ],
)
def test_a_published_run_that_went_out_of_memory_is_not_said_to_fit(
    model: str, dtype: str, tensor: int, pipeline: int, data: int, samples: int, batch: int
) -> None:
    assert not fits(model, dtype, tensor, pipeline, data, samples, batch)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "samples", "batch"),
    [(8, 2, 24, 2, 2016), (4, 6, 16, 4, 2048), (8, 4, 12, 4, 2016), (2, 12, 16, 2, 2048)],
)
def test_published_runs_beside_them_that_ran_are_said_to_fit(
    tensor: int, pipeline: int, data: int, samples: int, batch: int
) -> None:
    assert fits("181b", "fp16", tensor, pipeline, data, samples, batch)
