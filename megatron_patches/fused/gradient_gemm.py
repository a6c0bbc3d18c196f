"""Weight gradients added to the gradient buffer by the matrix product itself.

Megatron's `gradient_accumulation_fusion` calls Apex's extension `fused_weight_gradient_mlp_cuda`. Its
two functions are a matrix product with beta 1 into `main_grad`, which torch.addmm does: in one type for
16-bit buffers, and from 16-bit factors into an fp32 buffer by `out_dtype` on CUDA. torch 2.9 has
`out_dtype` too, but needs the buffer in the factors' type (aten/src/ATen/native/cuda/Blas.cpp).
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
    """Add grad_outputᵀ · total_input to main_grad; [n, in], [n, out], [out, in]."""
    left, right = grad_output.t(), total_input
    if main_grad.dtype == right.dtype:
        main_grad.addmm_(left, right)
    elif main_grad.is_cuda:
        torch.ops.aten.addmm.dtype_out(main_grad, left, right, main_grad.dtype, out=main_grad)
    else:  # The CPU has no product of mixed types.
        main_grad.addmm_(left.to(main_grad.dtype), right.to(main_grad.dtype))


def extension() -> ModuleType:
    """A module with the names of Apex's."""
    module = ModuleType(_EXTENSION)
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    return module


def _provide(available: bool) -> bool:
    from megatron.core.tensor_parallel import layers

    if available:
        return available
    if Version(torch.__version__) < OLDEST_TORCH:
        raise PatchError(
            "FUSED=gradient_gemm needs products of 16-bit factors that add to an fp32 buffer, which "
            f"torch {torch.__version__} does not have ({OLDEST_TORCH} has); leave it out."
        )
    module: Any = extension()
    sys.modules[_EXTENSION] = module
    layers.fused_weight_gradient_mlp_cuda = module
    return True


PATCH = fused_patch(
    "gradient_gemm",
    "adding weight gradients in the matrix product needs Apex's extension",
    Replacement("megatron.core.tensor_parallel.layers:_grad_accum_fusion_available", _provide),
)
