"""Compute attention by one of torch's kernels only (`FUSED=attention_flash` or `attention_cudnn`).

Target: `DotProductAttention.forward`. Without the patch, torch chooses the kernel by rules, and the kernels
cannot be measured against each other. A kernel that cannot take the inputs raises "No available kernel";
no slower kernel is used silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_patches.registry import Patch, Replacement, fused_patch, wrap_original


def use_only_backend(backend: SDPBackend) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a `Replacement.make` for a function that computes scaled_dot_product_attention with `backend` alone."""

    @wrap_original
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backend):
            return original(*args, **kwargs)

    return call


def _make_patch(name: str, backend: SDPBackend) -> Patch:
    """Return the patch that `FUSED=<name>` switches on."""
    return fused_patch(
        name,
        "torch chooses an attention kernel by rules, not by measurement",
        Replacement(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            use_only_backend(backend),
        ),
    )


FLASH = _make_patch("attention_flash", SDPBackend.FLASH_ATTENTION)
CUDNN = _make_patch("attention_cudnn", SDPBackend.CUDNN_ATTENTION)
