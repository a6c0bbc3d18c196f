from typing import Any

import pytest
import torch

from megatron_patches.fused.bias_gemm import BiasInProduct, _add_bias_in_product
from megatron_patches.registry import PatchError

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def linear(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any, *_: Any) -> torch.Tensor:
    """Return product plus bias in two steps, as Megatron computes it."""
    output = torch.matmul(input, weight.t())
    return output if bias is None else output + bias


FUSED = _add_bias_in_product(linear).__func__


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 2, 5, 7), (1, 1, 1, 1), (8, 3, 16, 48)])
def test_the_sum_with_the_bias_equals_float64(
    dtype: torch.dtype, shape: tuple[int, int, int, int], device: str
) -> None:
    torch.manual_seed(0)
    tokens, batch, inner, outer = shape
    x = torch.randn(tokens, batch, inner, device=device).to(dtype)
    weight = torch.randn(outer, inner, device=device).to(dtype)
    bias = torch.randn(outer, device=device).to(dtype)
    result = FUSED(None, x, weight, bias)
    expected = linear(None, x.double(), weight.double(), bias.double())
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * inner**0.5}
    assert (result.shape, result.dtype) == ((tokens, batch, outer), dtype)
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), expected, **close)


def test_the_bias_is_added_once_and_by_the_product() -> None:
    asked: list[str] = []

    def noting(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        output = torch.matmul(input, weight.t())
        asked.append("product with bias" if output[0, 0, 0] == 5 else "product alone")
        return output + bias

    ones = torch.ones(1, 1, 2)
    result = _add_bias_in_product(noting).__func__(
        None, ones, torch.ones(2, 2), torch.full((2,), 3.0)
    )
    assert asked == ["product with bias"]
    assert result.tolist() == [[[5.0, 5.0]]]


def test_without_a_bias_nothing_changes() -> None:
    x, weight = torch.randn(2, 1, 3), torch.randn(4, 3)
    assert torch.equal(FUSED(None, x, weight, None), torch.matmul(x, weight.t()))


def test_other_additions_and_later_products_are_unchanged() -> None:
    bias, other = torch.ones(2), torch.full((2,), 7.0)
    with BiasInProduct(bias) as mode:
        first = torch.matmul(torch.ones(1, 2), torch.eye(2))
        assert torch.equal(first + other, torch.full((1, 2), 9.0))
        assert torch.equal(torch.matmul(first, torch.eye(2)), first)
        assert (first + bias) is first
    mode.check()


def test_layer_with_another_bias_addition_is_refused() -> None:
    def otherwise(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return torch.matmul(input, weight.t()).sub(-bias)

    with pytest.raises(PatchError, match="add its bias after the product"):
        _add_bias_in_product(otherwise).__func__(
            None, torch.ones(1, 1, 2), torch.ones(2, 2), torch.ones(2)
        )
