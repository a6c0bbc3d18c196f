"""Compute the norm of a rank's gradients, with the signature of Apex's `multi_tensor_l2norm`.

`cpu/gradient_norm` and `fused/multi_tensor` put this function into Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def l2_norm(_: int, __: Any, lists: Sequence[Sequence[Tensor]], *___: Any) -> tuple[Tensor, None]:
    """Return the L2 norm over all tensors of all lists, and None.

    The norm has shape [1] and type fp32 and lies on the tensors' device. Apex returns the norm of each
    tensor as well, which Megatron does not use. The other arguments are ignored.
    """
    tensors: list[Tensor] = []
    for tensors_of_list in lists:
        tensors += tensors_of_list
    # On a CPU torch adds squares one by one and loses small ones in fp32 (cpu/gradient_norm.py). GPU
    # kernels add in blocks and do not.
    dtype = torch.float32 if tensors[0].is_cuda else torch.float64
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))
    return torch.linalg.vector_norm(norms).float().view(1), None
