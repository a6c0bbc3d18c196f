import torch
from torch.nn.attention import SDPBackend

from megatron_patches.fused.attention_backend import only


def test_inside_only_the_named_kernel_is_allowed() -> None:
    def allowed() -> list[bool]:
        cuda = torch.backends.cuda
        return [cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()]

    before = allowed()
    assert only(SDPBackend.FLASH_ATTENTION)(allowed)() == [True, False, False]
    assert only(SDPBackend.CUDNN_ATTENTION)(allowed)() == [False, True, False]
    assert allowed() == before


def test_the_kernels_result_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16)

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.testing.assert_close(only(SDPBackend.FLASH_ATTENTION)(attend)(), attend())
