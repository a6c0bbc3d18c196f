from typing import Any

import torch

from megatron_patches import start_weights
from parakit.config import variables


def test_initial_weights_are_loaded_only_if_a_checkpoint_is_named(monkeypatch: Any) -> None:
    monkeypatch.delenv(variables.START_WEIGHTS, raising=False)
    assert not start_weights.PATCH.needed(None)  # type: ignore[arg-type]
    monkeypatch.setenv(variables.START_WEIGHTS, "runs/.start/x")
    assert start_weights.PATCH.needed(None)  # type: ignore[arg-type]


def test_noise_is_added_only_to_constant_values_and_depends_on_name_and_seed() -> None:
    def noisy(values: torch.Tensor, name: str = "a", seed: str = "1") -> torch.Tensor:
        values = values.clone()
        start_weights.add_noise(name, values, seed)
        return values

    bias = torch.zeros(4)
    assert len(set(noisy(bias).tolist())) == 4
    assert torch.equal(noisy(bias), noisy(bias))
    assert not torch.equal(noisy(bias), noisy(bias, name="b"))
    assert not torch.equal(noisy(bias), noisy(bias, seed="2"))
    for kept in (torch.arange(4.0), torch.zeros(1), torch.zeros(4, dtype=torch.int64)):
        assert torch.equal(noisy(kept), kept)
