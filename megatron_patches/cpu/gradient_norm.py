"""The global gradient norm on CPU ranks, accumulated in double precision.

torch's CPU norm adds squares one after another in fp32. For the 3.2M-element gradient of a GPT-2
embedding that loses the small ones (off by 2.7e-4 after nine iterations of gpt2-tiny), and by how much
depends on how TP cuts the tensor: clipping then scales every gradient differently, and the loss curves
diverge. GPU kernels reduce in blocks and have no such error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_patches.registry import Replacement, cpu_patch


def l2_norm(
    chunk_size: int,  # noqa: ARG001 - the signature of amp_C.multi_tensor_l2norm
    overflow: torch.Tensor,  # noqa: ARG001
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    per_tensor: bool,  # noqa: ARG001
    *_: Any,
) -> tuple[torch.Tensor, None]:
    """Norm over all tensors, shape [1], fp32, and None for the norms of each, which nothing uses."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.float64)
        for tensors in tensor_lists
        for tensor in tensors
    ]
    return torch.linalg.vector_norm(torch.stack(norms)).float().view(1), None


PATCH = cpu_patch(
    "gradient_norm",
    "torch's fp32 norm on the CPU depends on how a large gradient is cut",
    Replacement("megatron.core.optimizer.clip_grads:l2_norm_impl", lambda _: l2_norm),
)
