"""Attention by one of torch's kernels and no other, so that they can be measured against each other.

A kernel that cannot take the inputs raises "No available kernel"; no slower one is used silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_patches.registry import Patch, Replacement, around, fused_patch


def only(backend: SDPBackend) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a function so that scaled_dot_product_attention in it uses this kernel alone."""

    @around
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(backend):
            return original(*args, **kwargs)

    return call


def _patch(name: str, backend: SDPBackend) -> Patch:
    return fused_patch(
        name,
        "torch chooses an attention kernel by rules, not by measurement",
        Replacement(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            only(backend),
        ),
    )


FLASH = _patch("attention_flash", SDPBackend.FLASH_ATTENTION)
CUDNN = _patch("attention_cudnn", SDPBackend.CUDNN_ATTENTION)
