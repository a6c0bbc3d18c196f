"""A data loader's own random draw does not advance the generator of dropout on CPU ranks.

`DataLoader.__iter__` draws a seed for its workers from the CPU's generator. On a GPU dropout uses the
device's; here it uses the CPU's, and a resumed run makes its loaders after it restored its random state:
its dropout would differ from that of an uninterrupted run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement


def _preserving_the_state(original: Callable[..., Any]) -> Callable[..., Any]:
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
    reason="a data loader draws from the generator that dropout uses, and changes it after a resume",
    needed=lambda context: context.on_cpu,
    replacements=(Replacement("torch.utils.data:DataLoader.__iter__", _preserving_the_state),),
)
