import math

import pytest
import torch

from megatron_patches.fused.bias_gelu import bias_gelu

TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(x: torch.Tensor) -> torch.Tensor:
    """Return tanh GELU by its formula (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 1, 1), (7, 3, 16), (128, 3, 4)])
def test_forward_and_both_gradients_equal_float64(
    dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    bias = torch.randn(shape[-1:], device=device).to(dtype).requires_grad_()
    upstream = torch.randn(shape, device=device).to(dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    expected = reference(wide[0] + wide[1])
    expected.backward(upstream.double())
    result = bias_gelu(x, bias)
    result.backward(upstream)
    # A bias gradient sums rounded values over tokens, so errors grow with the root of the number of tokens.
    tokens = shape[0] * shape[1]
    close = {
        "rtol": TOLERANCE[dtype],
        "atol": 4 * TOLERANCE[dtype] * max(1.0, (tokens / 21) ** 0.5),
    }
    torch.testing.assert_close(result.double(), expected, **close)
    for narrow, reference_ in zip((x, bias), wide, strict=True):
        assert narrow.grad is not None
        torch.testing.assert_close(narrow.grad.double(), reference_.grad, **close)


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
def test_bias_gelu_equals_the_fusion_of_megatron() -> None:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    torch.manual_seed(0)
    x, bias = torch.randn(6, 2, 8), torch.randn(8)
    both = [[t.clone().requires_grad_() for t in (x, bias)] for _ in range(2)]
    # Megatron compiles its function when it is loaded, but only the arithmetic is compared.
    with torch.compiler.set_stance("force_eager"):
        out = [
            function(*pair)
            for function, pair in zip((bias_gelu, bias_gelu_impl), both, strict=True)
        ]
        for result in out:
            result.square().sum().backward()
    for mine, reference in zip(*both, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-5, atol=1e-5)


def test_bias_gradient_is_summed_in_fp32(device: str) -> None:
    # 4096 gradients of 1.0 in fp16: a running fp16 sum would stop at 2048.
    x = torch.full((4096, 1, 2), 30.0, dtype=torch.float16, device=device)
    bias = torch.zeros(2, dtype=torch.float16, device=device, requires_grad=True)
    bias_gelu(x, bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [4096.0, 4096.0]


def test_bias_gelu_stores_only_its_inputs_for_backward() -> None:
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    x, bias = torch.randn(6, 2, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        bias_gelu(x, bias)
    assert kept == [x.data_ptr(), bias.data_ptr()]
