"""Products of parallel degrees on four and eight CPU ranks print the losses of a single rank."""

import pytest

from parakit.artifacts.run import Status
from tests.examples.runs import Run, Trainer

PARAMETERS = {
    "tp2dp2": {141_824},
    "pp2dp2": {177_792, 173_824},
    "tp2pp2": {91_328, 87_360},
    "tp2cp2": {141_824},
    "tp2dp2-zero1": {141_824},
    "tp2dp2-zero3": {141_824},
    "vpp2dp2-zero1": {177_792, 173_824},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_products_on_four_ranks_print_baselines_losses(
    baseline: Run, train: Trainer, name: str
) -> None:
    run = train(f"train-{name}-gpt2-tiny-4cpu", micro_batch_size=1)
    assert run.status.status is Status.OK
    assert run.losses == pytest.approx(baseline.losses, abs=1.1e-5)
    assert set(run.parameters.values()) == PARAMETERS[name]


@pytest.mark.slow
def test_three_dimensions_on_eight_ranks_print_baselines_losses(
    baseline: Run, train: Trainer
) -> None:
    run = train("train-tp2pp2dp2-gpt2-tiny-8cpu", micro_batch_size=1)
    assert run.losses == pytest.approx(baseline.losses, abs=1.1e-5)
