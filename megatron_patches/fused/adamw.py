"""Update the weights with torch's AdamW in one kernel (`FUSED=adamw`).

Target: `torch.optim.AdamW`, which Megatron takes without Transformer Engine and Apex. Without the patch,
it updates all tensors at once (`foreach`) but in about a dozen passes over memory; `fused=True` needs one
pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, fused_patch


def _make_fused_adamw(original: type[torch.optim.AdamW]) -> Callable[..., Any]:
    """Return a subclass of AdamW that always uses the fused kernel."""

    class FusedAdamW(original):  # type: ignore[valid-type, misc]
        """torch's AdamW with its fused kernel.

        Making one raises RuntimeError if the kernel does not support a parameter's type or device.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "fused": True})

    return FusedAdamW


PATCH = fused_patch(
    "adamw",
    "torch's AdamW passes over memory about a dozen times a step",
    # This is applied before Megatron is imported: 0.15rc takes the class at import, later versions when
    # they make an optimizer.
    Replacement("torch.optim:AdamW", _make_fused_adamw),
)
