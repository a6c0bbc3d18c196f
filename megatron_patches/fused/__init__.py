"""What Transformer Engine and Apex do faster on a GPU, done with torch alone; off unless named.

`FUSED=norm,adamw make train-…` switches patches on by the names in `megatron_patches.fusions`, which
loads no torch and is read by `parakit.launch`. Each patch changes how something is computed, never what:
the tests check it against Megatron's own path and float64. All else is imported by
`megatron_patches.catalogue` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as compiled, once; looked up when it is called: CPU ranks replace the compiler."""
    return torch.compile(function)
