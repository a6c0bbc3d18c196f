"""The norm of a rank's gradients in place of Apex's and Transformer Engine's `multi_tensor_l2norm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def l2_norm(_: int, __: Any, lists: Sequence[Sequence[Tensor]], *___: Any) -> tuple[Tensor, None]:
    """Norm over all tensors, shape [1], fp32, on their device; no norm of each, which nothing uses."""
    tensors = [tensor for tensors in lists for tensor in tensors]
    # torch's CPU norm loses small squares in fp32 (cpu/gradient_norm.py); GPU kernels reduce in blocks.
    dtype = torch.float32 if tensors[0].is_cuda else torch.float64
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    return torch.linalg.vector_norm(norms).float().view(1), None
