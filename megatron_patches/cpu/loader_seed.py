"""A data loader's own random draw does not advance the generator of dropout on CPU ranks.

`DataLoader.__iter__` draws a seed for its workers from the CPU's generator. On a GPU dropout uses the
device's; here it uses the CPU's, and a resumed run makes its loaders after it restored its random state:
its dropout would differ from that of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, around, cpu_patch


@around
def _preserving_the_state(original: Callable[..., Any], self: Any) -> Any:
    state = torch.get_rng_state()
    try:
        return original(self)
    finally:
        torch.set_rng_state(state)


PATCH = cpu_patch(
    "loader_seed",
    "a data loader draws from the generator that dropout uses, and changes it after a resume",
    Replacement("torch.utils.data:DataLoader.__iter__", _preserving_the_state),
)
