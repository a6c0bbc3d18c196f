import pytest
import torch

from megatron_patches.fused.gradient_gemm import _provide, accumulate, make_extension
from megatron_patches.registry import PatchError

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("shape", [(6, 3, 5), (1, 1, 1), (33, 17, 9)])
@pytest.mark.parametrize("buffer", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_product_is_added_to_the_values_in_the_buffer(
    shape: tuple[int, int, int], buffer: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    if buffer not in (dtype, torch.float32):
        pytest.skip("Megatron's buffers are fp32 or of the parameters' type")
    torch.manual_seed(0)
    tokens, inner, outer = shape
    total_input = torch.randn(tokens, inner, device=device).to(dtype)
    grad_output = torch.randn(tokens, outer, device=device).to(dtype)
    main_grad = torch.randn(outer, inner, device=device).to(buffer)
    expected = main_grad.double() + grad_output.double().t() @ total_input.double()
    address = main_grad.data_ptr()
    accumulate(total_input, grad_output, main_grad)
    assert main_grad.data_ptr() == address
    tolerance = TOLERANCE[buffer] * tokens**0.5
    torch.testing.assert_close(main_grad.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_extension_has_the_names_that_megatron_calls() -> None:
    module = make_extension()
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        assert getattr(module, name) is accumulate


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
def test_a_torch_that_cannot_add_to_fp32_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(PatchError, match=r"torch 2\.9\.1\+cu128 does not have \(2\.10 has\)"):
        _provide(False)
