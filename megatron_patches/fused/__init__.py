"""Patches that do on a GPU with torch alone what Transformer Engine and Apex do faster.

They are off unless named: `FUSED=norm,adamw make train-…` switches on the patches with these names in
`megatron_patches.fusions`. Each patch changes how a result is computed, and not the result: the tests
compare it with Megatron's own path and with float64. Only `megatron_patches.catalogue` imports the modules
of this folder; `parakit.launch` reads `fusions`, which does not load torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by `torch.compile`, which is called once per function.

    `torch.compile` is looked up at the call and not at import, because CPU ranks replace it.
    """
    return torch.compile(function)
