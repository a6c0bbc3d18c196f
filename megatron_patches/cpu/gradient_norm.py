"""The global gradient norm on CPU ranks, accumulated in double precision.

torch's CPU norm adds squares one after another in fp32. For the 3.2M-element gradient of a GPT-2
embedding that loses the small ones (off by 2.7e-4 after nine iterations of gpt2-tiny), and by how much
depends on how TP cuts the tensor: clipping then scales every gradient differently, and the loss curves
diverge. GPU kernels reduce in blocks and have no such error.
"""

from __future__ import annotations

from megatron_patches.l2_norm import l2_norm
from megatron_patches.registry import Replacement, cpu_patch

PATCH = cpu_patch(
    "gradient_norm",
    "torch's fp32 norm on the CPU depends on how a large gradient is cut",
    Replacement("megatron.core.optimizer.clip_grads:l2_norm_impl", lambda _: l2_norm),
)
