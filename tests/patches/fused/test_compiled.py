"""Functions that are compiled on a GPU are compiled here too: each is a single graph with the same results."""

from collections.abc import Callable

import pytest
import torch

from megatron_patches.fused.bias_gelu import gelu_of_sum, gradients
from megatron_patches.fused.cross_entropy import token_statistics, write_gradient
from megatron_patches.fused.norm import layer_norm


def inputs(name: str, device: str) -> tuple[object, ...]:
    """Return inputs with the same numbers on each device."""
    torch.manual_seed(0)
    return tuple(_on(device, value) for value in _inputs(name))


def _on(device: str, value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _inputs(name: str) -> tuple[object, ...]:
    x = torch.randn(6, 40, requires_grad=name == "layer_norm")
    row, target = torch.randn(40, requires_grad=name == "layer_norm"), torch.arange(6)
    return {
        "gelu_of_sum": (x, row),
        "gradients": (x.view(2, 3, 40), torch.randn(2, 3, 40), row),
        "layer_norm": (x, row, torch.randn(40, requires_grad=True), 1e-5),
        "token_statistics": (x, target),
        "write_gradient": (x, target, torch.logsumexp(x, -1), torch.rand(6)),
    }[name]


def computed(function: Callable[..., object], name: str, device: str) -> list[torch.Tensor]:
    arguments = inputs(name, device)
    out = function(*arguments)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        assert isinstance(out, torch.Tensor)
        out.square().sum().backward()
        return [out.detach(), *(t.grad for t in tensors if t.grad is not None)]
    if isinstance(out, tuple):
        return list(out)
    return [out] if isinstance(out, torch.Tensor) else tensors[:1]


@pytest.mark.slow  # The compiler runs a C++ compiler.
@pytest.mark.filterwarnings("ignore")  # The compiler itself warns.
@pytest.mark.parametrize(
    "function", [gelu_of_sum, gradients, layer_norm, token_statistics, write_gradient]
)
def test_compiled_function_is_a_single_graph_with_the_same_result(
    function: Callable[..., object], device: str
) -> None:
    name = function.__name__
    compiled = computed(torch.compile(function, fullgraph=True), name, device)
    plain = computed(function, name, device)
    assert len(compiled) == len(plain) > 0
    for actual, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
