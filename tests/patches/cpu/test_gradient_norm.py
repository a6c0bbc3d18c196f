import torch

from megatron_patches.l2_norm import l2_norm


def norm(*tensors: torch.Tensor) -> float:
    return float(l2_norm(0, torch.zeros(1), [list(tensors)], False)[0])


def test_the_norm_runs_over_all_tensors() -> None:
    assert norm(torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])) == 5.0


def test_small_gradients_count_beside_a_large_one_for_any_sharding() -> None:
    gradient = torch.full((4_000_000,), 1e-4)
    gradient[0] = 10.0
    exact = float(gradient.double().norm())
    assert norm(gradient) == torch.tensor(exact).float()
    assert norm(gradient[:7], gradient[7:]) == norm(gradient)
    assert abs(float(torch.norm(gradient)) - exact) > 1e-6, "torch's own norm has become exact"
