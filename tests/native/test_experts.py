"""The native mixture of experts without a process group: routing, losses and counts."""

import math

import pytest
import torch

from parakit.config.model import load_model
from parakit.costs.tensors import active_parameters, total_parameters
from parakit.native.model import (
    GPT,
    MixtureOfExperts,
    balance_loss,
    find_expert_layers,
    rotate,
    run_local_experts,
    z_loss,
)
from parakit.native.optimizer import muon_parameters
from parakit.native.settings import Settings, parse_settings
from tests.native.small_model import REQUIRED, settings

TINY = ("--num-experts", "4", "--moe-ffn-hidden-size", "8", "--disable-bias-linear")


def preset(name: str, *more: str) -> Settings:
    """Return the settings of a named model instead of the tests' sizes."""
    model = load_model(name)
    sizes = REQUIRED[REQUIRED.index("--micro-batch-size") :]
    return parse_settings((*sizes, *model.flags, *more))


@pytest.fixture
def layer() -> MixtureOfExperts:
    torch.manual_seed(0)
    return MixtureOfExperts(settings(*TINY, "--no-bias-gelu-fusion"), layer=1)


def test_output_is_the_softmax_weighted_sum_of_the_top_two_experts(
    layer: MixtureOfExperts,
) -> None:
    x = torch.randn(2, 3, 16)
    logits = layer.router(x)
    for position in ((0, 0), (1, 2)):
        top, chosen = logits[position].topk(2)
        parts = [layer.experts[int(number)](x[position]) for number in chosen]
        expected = sum(w * part for w, part in zip(top.softmax(0), parts, strict=True))
        torch.testing.assert_close(layer(x)[position], expected)


def test_gradients_of_an_expert_without_tokens_are_zero(layer: MixtureOfExperts) -> None:
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[9.0], [8.0], [-9.0], [-9.0]]).expand(4, 16))
    layer(torch.ones(1, 5, 16)).sum().backward()
    gradients = [expert.fc1.weight.grad for expert in layer.experts]
    assert all(gradient is not None for gradient in gradients)
    assert [bool(gradient.any()) for gradient in gradients] == [True, True, False, False]


def test_balance_loss_is_one_for_even_experts_and_experts_over_k_for_one_choice() -> None:
    even = torch.full((8, 4), 0.25)
    assert balance_loss(even, torch.tensor([4, 4, 4, 4])) == pytest.approx(1)
    certain = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(8, 4)
    assert balance_loss(certain, torch.tensor([8, 8, 0, 0])) == pytest.approx(2)


def test_z_loss_is_the_squared_logsumexp() -> None:
    assert z_loss(torch.zeros(3, 8)) == pytest.approx(math.log(8) ** 2)


def test_auxiliary_loss_is_the_sum_of_both_losses_times_their_coefficients() -> None:
    coefficients = ("--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.25")
    layer = MixtureOfExperts(settings(*TINY, *coefficients), layer=1)
    layer(torch.randn(1, 4, 16))
    assert layer.losses is not None
    balance, z = layer.losses
    torch.testing.assert_close(layer.auxiliary_loss(), 0.5 * balance + 0.25 * z)


def test_local_experts_get_consecutive_rows_in_order() -> None:
    experts = [torch.nn.Linear(1, 1, bias=False) for _ in range(3)]
    for factor, expert in enumerate(experts):
        torch.nn.init.constant_(expert.weight, factor)
    done = run_local_experts(torch.ones(5, 1), torch.tensor([2, 0, 3]), experts)
    assert done.flatten().tolist() == [0, 0, 2, 2, 2]


def test_rotary_embedding_keeps_norms_and_products_depend_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8)
    turned_q, turned_k = (rotate(x.expand(1, 1, 6, 8), 10_000)[0, 0] for x in (query, key))
    products = turned_q @ turned_k.T
    torch.testing.assert_close(products[3, 1], products[5, 3])
    torch.testing.assert_close(turned_q.norm(dim=-1), query.norm().expand(6))
    torch.testing.assert_close(turned_q[0], query[0, 0, 0])


def test_blueberry_has_exactly_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        model = GPT(preset("blueberry-79m", "--silu"))
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == 79_059_840
    idle = 6 * 6 * sum(p.numel() for p in find_expert_layers(model)[0].experts[0].parameters())
    assert 79_059_840 - idle == 36_592_512
    muon = muon_parameters(model)
    assert (len(muon), sum(p.numel() for p in muon)) == (114, 60_180_480)
    assert all(layer.router.weight in set(muon) for layer in find_expert_layers(model))
    other_names = set(parameters) - set(muon)
    assert sum(p.numel() for p in other_names) == 18_879_360


def test_planner_and_native_model_have_the_same_number_of_parameters() -> None:
    for name in ("blueberry-79m", "blueberry-dense", "moe-tiny", "moe-tiny-dense"):
        shape = load_model(name).shape
        with torch.device("meta"):
            model = GPT(preset(name, "--vocab-size", str(shape.vocabulary)))
        assert sum(p.numel() for p in model.parameters()) == total_parameters(shape)
    assert active_parameters(load_model("blueberry-79m").shape) == 36_592_512


@pytest.mark.parametrize(
    ("flags", "width"),
    [((), 64), (("--swiglu",), 0), (("--ffn-hidden-size", "24"), 24)],
)
def test_default_mlp_width_equals_megatrons(flags: tuple[str, ...], width: int) -> None:
    assert settings(*flags).mlp_width == width  # two thirds of 64, rounded down to 64s: 0


def test_evaluation_without_gradients_records_no_routing(layer: MixtureOfExperts) -> None:
    layer.eval()
    with torch.no_grad():
        assert layer(torch.randn(1, 4, 16)).shape == (1, 4, 16)
