from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron_patches.fused.attention_backend import use_only_backend
from megatron_patches.no_te.attention import attend, causal_mask


def test_only_the_named_kernel_is_allowed_inside_the_context() -> None:
    def allowed() -> list[bool]:
        cuda = torch.backends.cuda
        return [cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()]

    before = allowed()
    assert use_only_backend(SDPBackend.FLASH_ATTENTION)(allowed)() == [True, False, False]
    assert use_only_backend(SDPBackend.CUDNN_ATTENTION)(allowed)() == [False, True, False]
    assert allowed() == before


def test_result_of_the_kernel_equals_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16)

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.testing.assert_close(use_only_backend(SDPBackend.FLASH_ATTENTION)(attend)(), attend())


TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
KERNELS = {
    "chosen": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attending(kernel: str, device: str) -> Callable[..., torch.Tensor]:
    """Return the patched attention with a named kernel, or with the kernel that torch chooses."""
    backend = KERNELS[kernel]
    if backend is SDPBackend.CUDNN_ATTENTION and device == "cpu":
        pytest.skip("cuDNN is a library for GPUs")
    return attend if backend is None else use_only_backend(backend)(attend)


def check_against_float64(
    kernel: str,
    dtype: torch.dtype,
    device: str,
    shapes: list[tuple[int, ...]],
    mask: torch.Tensor | None = None,
) -> None:
    """Compare the result and all gradients with float64, for query, key and value of these shapes."""
    torch.manual_seed(0)
    inputs = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    length, batch, heads, width = shapes[0]
    upstream = torch.randn(length, batch, heads * width, device=device).to(dtype)
    out = attending(kernel, device)(*inputs, mask, width**-0.5, 0.0)
    out.backward(upstream)
    expected = attend(*exact, mask, width**-0.5, 0.0)
    expected.backward(upstream.double())
    close = {"rtol": TOLERANCE[dtype], "atol": 4 * TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), expected, **close)
    for mine, reference in zip(inputs, exact, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.double(), reference.grad, **close)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [4, 2])
def test_each_kernel_and_its_gradients_equal_float64(
    kernel: str, dtype: torch.dtype, groups: int, device: str
) -> None:
    # The length is odd, and the width is that of a head of gpt2-large.
    shapes = [(33, 2, 4, 80), (33, 2, groups, 80), (33, 2, groups, 80)]
    check_against_float64(kernel, dtype, device, shapes)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kernel", ["chosen", "cudnn"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_with_the_mask_of_split_sequences_and_its_gradients_equal_float64(
    kernel: str, dtype: torch.dtype, rank: int, device: str
) -> None:
    # gpt2-large over two ranks: 512 queries, 1024 keys, heads 80 wide.
    shapes = [(512, 1, 2, 80), (1024, 1, 2, 80), (1024, 1, 2, 80)]
    mask = causal_mask(rank, 2, 512).to(device)
    check_against_float64(kernel, dtype, device, shapes, mask)


@pytest.mark.parametrize("kernel", ["chosen", "cudnn"])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_its_fraction_and_keeps_the_mean_in_16_bits(
    kernel: str, p: float, device: str
) -> None:
    torch.manual_seed(0)
    # Equal scores, and a value that tells its position: each weight of the last query can be read.
    query = torch.zeros(64, 200, 1, 64, device=device, dtype=torch.bfloat16)
    value = torch.eye(64, device=device, dtype=torch.bfloat16)[:, None, None, :].expand(
        64, 200, 1, 64
    )
    out = attending(kernel, device)(query, query, value.contiguous(), None, 0.1, p)[-1].double()
    dropped = (out == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=4 * (p * (1 - p) / out.numel()) ** 0.5)
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (64 * (1 - p))), rtol=1e-2, atol=0)
