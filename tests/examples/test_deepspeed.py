"""DeepSpeed's ZeRO stages on CPU ranks, if the optional package is installed."""

import importlib.util

import pytest

from parakit.artifacts.run import Status
from parakit.config.run import Backend
from tests.examples.runs import Run, Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is optional: make setup-deepspeed",
    ),
]


@pytest.mark.parametrize("strategy", ["dp2", "zero1", "zero2", "zero3"])
def test_every_stage_prints_megatrons_losses(baseline: Run, train: Trainer, strategy: str) -> None:
    run = train(f"train-{strategy}-gpt2-tiny-2cpu", backend=Backend.DEEPSPEED)
    assert run.status.status is Status.OK
    assert run.record.spec.backend == "deepspeed"
    assert run.record.software["deepspeed"]
    assert run.losses == pytest.approx(baseline.losses, abs=1.1e-5)
