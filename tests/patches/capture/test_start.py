"""The state at the start of an iteration is restored so that the iteration can be repeated."""

from types import SimpleNamespace

import pytest
import torch

from megatron_patches.capture.start import Snapshot

# Megatron warns about packages that are not installed.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_overflowing_iteration_is_repeated_with_its_loss_scale() -> None:
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = SimpleNamespace(_scale=torch.tensor([4.0]), _hysteresis_tracker=1)
    scheduler = SimpleNamespace(num_steps=3)
    begins = Snapshot([model], SimpleNamespace(optimizer=inner, grad_scaler=scaler), scheduler)
    scaler._scale = scaler._scale * 0.5
    scaler._hysteresis_tracker, scheduler.num_steps = 0, 4
    begins.restore()
    assert (scaler._scale.item(), scaler._hysteresis_tracker, scheduler.num_steps) == (4.0, 1, 3)


def test_optimizer_without_a_loss_scale_is_restored() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()
    begins = Snapshot([model], optimizer, SimpleNamespace())
    model(torch.ones(1)).backward()
    optimizer.step()
    assert model.weight.item() != before
    begins.restore()
    assert model.weight.item() == before
