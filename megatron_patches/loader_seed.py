"""A data loader's own random draw, kept out of the device's generator on CPU ranks.

`DataLoader.__iter__` draws a seed for its workers from the CPU's generator. On a GPU dropout draws from
another one; here the CPU's stands in for it, and a resumed run makes its loaders after its random state
was restored: its dropout would part from that of a run that was never stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement


def _leaving_the_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return original(self)
        finally:
            torch.set_rng_state(state)

    return iterate


PATCH = Patch(
    name="loader_seed",
    reason="a data loader draws from the generator that stands in for the device's",
    needed=lambda situation: situation.on_cpu,
    replacements=(Replacement("torch.utils.data:DataLoader.__iter__", _leaving_the_generator),),
)
