import pytest
import torch

from megatron_patches.fused.norm import CompiledLayerNorm, make_compiled_norm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def norm_of(width: int, dtype: torch.dtype, device: str) -> torch.nn.LayerNorm:
    torch.manual_seed(1)
    norm = torch.nn.LayerNorm(width, eps=1e-5, device=device, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 1, 2), (4, 3, 64)])
def test_forward_and_gradients_equal_torchs_in_float64(
    dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    result = make_compiled_norm(norm_of(shape[-1], dtype, device))
    exact = norm_of(shape[-1], dtype, device).double()
    x = torch.randn(shape, device=device).add(3).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    upstream = torch.randn(shape, device=device).to(dtype)
    out = result(x)
    out.backward(upstream)
    expected = exact(wide)
    expected.backward(upstream.double())
    close = {"rtol": TOLERANCE[dtype], "atol": 20 * TOLERANCE[dtype]}
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **close)
    torch.testing.assert_close(x.grad.double(), wide.grad, **close)  # type: ignore[union-attr]
    for mine, reference in zip(result.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), reference.grad, **close)  # type: ignore[union-attr]


def test_norm_cast_to_another_dtype_keeps_its_parameters_and_their_attributes() -> None:
    norm = torch.nn.LayerNorm(4)
    norm.weight.sequence_parallel = True  # type: ignore[attr-defined]
    names = list(norm.state_dict())
    result = make_compiled_norm(norm)
    assert isinstance(result, CompiledLayerNorm)
    assert list(result.state_dict()) == names
    assert result.weight.sequence_parallel  # type: ignore[attr-defined]


def test_other_norms_are_unchanged() -> None:
    for norm in (
        torch.nn.RMSNorm(4),
        torch.nn.LayerNorm(4, bias=False),
        torch.nn.LayerNorm((2, 4)),
    ):
        assert type(make_compiled_norm(norm)) is type(norm)
