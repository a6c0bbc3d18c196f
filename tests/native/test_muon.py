"""PyTorch's Muon compared with the published formula in fp64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from parakit.native.model import GPT
from parakit.native.optimizer import MuonAdamW, muon_adamw, muon_parameters
from parakit.native.parallel import refuse_combinations
from tests.native.small_model import settings

Matrix = NDArray[np.float64]
BF16_ERROR = 0.04
"""Relative error of an update whose five steps are computed in bf16 (8 bits); 0.007 to 0.02 were measured."""


def orthogonalised(matrix: Matrix) -> Matrix:
    """Return the result of five Newton–Schulz steps of Keller Jordan's Muon."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def update(gradient: Matrix, momentum: Matrix, rate: float) -> tuple[Matrix, Matrix]:
    """Return the update: Nesterov momentum 0.95, orthogonalised, scaled by √max(1, rows/columns)."""
    momentum = 0.95 * momentum + 0.05 * gradient
    step = orthogonalised(0.05 * gradient + 0.95 * momentum)
    rows, columns = gradient.shape
    return -rate * max(1, rows / columns) ** 0.5 * step, momentum


MUON = ("--optimizer", "muon", "--decoupled-lr", "1e-4")


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(
        settings(*MUON, "--num-experts", "2", "--disable-bias-linear", "--init-method-std", "1")
    )


def step_with_rate(optimizer: MuonAdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate", 1.0)
    optimizer.step()


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48), (8, 32)])
def test_three_updates_equal_the_published_formula_within_bf16_error(
    shape: tuple[int, int],
) -> None:
    generator = np.random.default_rng(7)
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon([weight], lr=0.01, weight_decay=0.0, adjust_lr_fn="original")
    expected, momentum = np.zeros(shape), np.zeros(shape)
    for _ in range(3):
        gradient = generator.standard_normal(shape)
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
        change, momentum = update(gradient, momentum, 0.01)
        expected += change
    error = np.linalg.norm(weight.detach().numpy() - expected) / np.linalg.norm(expected)
    assert error < BF16_ERROR


def test_pytorchs_newton_schulz_steps_in_fp32_equal_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    from torch.optim import _muon

    gradient = np.random.default_rng(3).standard_normal((48, 16))
    result = _muon._zeropower_via_newtonschulz(
        torch.tensor(gradient, dtype=torch.float32), (3.4445, -4.7750, 2.0315), 5, 1e-7
    )
    assert result.dtype is torch.float32
    np.testing.assert_allclose(result.numpy(), orthogonalised(gradient), rtol=0, atol=2e-6)


def test_pytorchs_muon_defaults_are_the_published_constants() -> None:
    defaults = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    assert defaults["ns_coefficients"] == (3.4445, -4.7750, 2.0315)
    assert (defaults["ns_steps"], defaults["momentum"], defaults["nesterov"]) == (5, 0.95, True)


def test_muon_updates_hidden_matrices_and_adamw_all_others_with_its_rate(model: GPT) -> None:
    optimizer = muon_adamw(model, settings(*MUON))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_with_rate(optimizer, 1e-3)
    hidden = set(muon_parameters(model))
    for name, parameter in model.named_parameters():
        assert ("momentum_buffer" in optimizer.state[parameter]) == (parameter in hidden), name
        assert ("exp_avg" in optimizer.state[parameter]) == (parameter not in hidden), name
    # Adam's first update equals its learning rate, which is a tenth of Muon's.
    moved = before["norm.weight"] - model.norm.weight.detach()
    torch.testing.assert_close(moved, torch.full((16,), 1e-4), rtol=1e-3, atol=0)


def test_pytorch_rule_has_no_weight_decay_in_muon(model: GPT) -> None:
    optimizer = muon_adamw(model, settings(*MUON))
    weight = model.blocks[0].attention.proj.weight
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step_with_rate(optimizer, 1e-3)
    torch.testing.assert_close(weight.detach(), before)


MEGATRONS = ("--optimizer", "muon", "--muon-rule", "megatron", "--decoupled-lr", "1e-4")


@pytest.mark.parametrize("wrapped", [False, True])
def test_megatron_rule_decays_matrices_and_uses_decoupled_lr_for_the_vocabulary_only(
    wrapped: bool,
) -> None:
    torch.manual_seed(0)
    chosen = settings(*MEGATRONS, "--init-method-std", "1")
    model = GPT(chosen)
    # DDP names parameters in this way.
    optimizer = muon_adamw(torch.nn.ModuleDict({"module": model}) if wrapped else model, chosen)
    rates = {
        id(p): (group.get("rate", 1.0), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    decay = chosen.weight_decay
    assert rates[id(model.word_embeddings.weight)] == (pytest.approx(0.1), decay)
    assert rates[id(model.norm.weight)] == (1.0, 0.0)
    assert rates[id(model.blocks[0].attention.proj.weight)] == (1.0, decay)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    positions = model.position_embeddings.weight
    before = positions.detach().clone()
    step_with_rate(optimizer, 1e-2)
    assert "momentum_buffer" in optimizer.state[positions], "Megatron gives these to Muon"
    torch.testing.assert_close(positions.detach(), before * (1 - 1e-2 * decay))


@pytest.mark.parametrize(
    ("precision", "lower", "upper"), [("medium", 1e-3, 1.0), ("high", 0.0, 1e-4)]
)
def test_rounding_error_of_a_low_rank_gradient_moves_megatrons_bf16_update(
    precision: str, lower: float, upper: float
) -> None:
    """bf16 rounding errors lie in directions that few tokens leave empty, and the five steps enlarge them."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(256, 384))
    gradient = torch.randn(256, 8) @ torch.randn(8, 384)
    plain, perturbed = (
        megatron_update(weight, gradient * factor, precision)
        for factor in (torch.ones(()), 1 + 6e-8 * torch.randn_like(gradient))
    )
    moved = float((plain - perturbed).norm() / plain.norm())
    assert lower < moved < upper


def megatron_update(weight: torch.nn.Parameter, gradient: Tensor, precision: str) -> Tensor:
    """Return the update of Megatron without weight decay."""
    holder = torch.nn.Module()
    holder.register_parameter("hidden", weight)
    flags = ("--weight-decay", "0", "--muon-momentum", "0.95", "--muon-fp32-matmul-prec", precision)
    optimizer = muon_adamw(holder, settings(*MEGATRONS, *flags))
    weight.data.zero_()
    weight.grad = gradient
    step_with_rate(optimizer, 1.0)
    return weight.detach().clone()


def test_pytorch_rule_refuses_another_precision_than_bf16() -> None:
    flags = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")
    with pytest.raises(SystemExit, match="makes its steps in bf16; use OPTIMIZER=megatron-muon"):
        refuse_combinations(settings(*flags), 1)
