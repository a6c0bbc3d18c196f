"""AdamW in one kernel.

Without Transformer Engine and Apex Megatron takes torch.optim.AdamW, which by default goes over all
tensors at once (`foreach`), but in about a dozen passes over memory. `fused=True` makes one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, fused_patch


def _in_one_kernel(original: type[torch.optim.AdamW]) -> Callable[..., Any]:
    class FusedAdamW(original):  # type: ignore[valid-type, misc]
        """torch's AdamW with its fused kernel; raises RuntimeError where a parameter has none."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "fused": True})

    return FusedAdamW


PATCH = fused_patch(
    "adamw",
    "torch's AdamW passes over memory about a dozen times a step",
    # Before Megatron imports it: 0.15rc takes the class at import, later ones at construction.
    Replacement("torch.optim:AdamW", _in_one_kernel),
)
