"""Add weight gradients to the gradient buffer in the matrix product itself (`FUSED=gradient_gemm`).

Target: `_grad_accum_fusion_available` of `megatron.core.tensor_parallel.layers`. Megatron's
`gradient_accumulation_fusion` calls Apex's extension `fused_weight_gradient_mlp_cuda`. Without the patch
and without Apex, Megatron computes the gradient and adds it in a separate pass. The extension's two
functions are a matrix product with beta 1 into `main_grad`. torch.addmm does that too: in one type for
16-bit buffers, and from 16-bit factors into an fp32 buffer by `out_dtype` on CUDA. torch 2.9 has
`out_dtype` as well, but needs the buffer in the factors' type (aten/src/ATen/native/cuda/Blas.cpp).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from megatron_patches.registry import PatchError, Replacement, fused_patch

OLDEST_TORCH = Version("2.10")
_EXTENSION = "fused_weight_gradient_mlp_cuda"


def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_outputᵀ · total_input to main_grad in place.

    Shapes: total_input [n, in], grad_output [n, out], main_grad [out, in].
    """
    transposed, dtype = grad_output.t(), main_grad.dtype
    if dtype == total_input.dtype:
        main_grad.addmm_(transposed, total_input)
    elif main_grad.is_cuda:
        torch.ops.aten.addmm.dtype_out(main_grad, transposed, total_input, dtype, out=main_grad)
    else:
        # On a CPU torch has no product of 16-bit factors into an fp32 result.
        main_grad.addmm_(transposed.to(dtype), total_input.to(dtype))


def make_extension() -> ModuleType:
    """Return a module with the two functions of Apex's extension; `accumulate` serves both types."""
    module = ModuleType(_EXTENSION)
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    return module


def _provide(is_available: bool) -> bool:
    """Return True after installing the module where Megatron expects the extension.

    If Apex's extension is available, nothing is installed.

    Raises:
        PatchError: torch is older than `OLDEST_TORCH`.
    """
    from megatron.core.tensor_parallel import layers

    if is_available:
        return is_available
    if Version(torch.__version__) < OLDEST_TORCH:
        raise PatchError(
            "FUSED=gradient_gemm needs products of 16-bit factors that add to an fp32 buffer, which "
            f"torch {torch.__version__} does not have ({OLDEST_TORCH} has); leave it out."
        )
    module: Any = make_extension()
    sys.modules[_EXTENSION] = module
    layers.fused_weight_gradient_mlp_cuda = module
    return True


PATCH = fused_patch(
    "gradient_gemm",
    "adding weight gradients in the matrix product needs Apex's extension",
    Replacement("megatron.core.tensor_parallel.layers:_grad_accum_fusion_available", _provide),
)
