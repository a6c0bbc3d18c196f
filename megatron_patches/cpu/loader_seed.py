"""Keep data loaders from advancing the random generator that dropout uses on CPU ranks.

Target: `DataLoader.__iter__`, which draws a seed for its workers from the CPU's generator. On a GPU
dropout uses the device's generator, on a CPU the same one as the loader. A resumed run makes its loaders
after it has restored its random state. Without the patch, its dropout would therefore differ from that of
an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, cpu_patch, wrap_original


@wrap_original
def _preserve_rng_state(original: Callable[..., Any], self: Any) -> Any:
    """Make the iterator and restore the state of the CPU's random generator."""
    state = torch.get_rng_state()
    try:
        return original(self)
    finally:
        torch.set_rng_state(state)


PATCH = cpu_patch(
    "loader_seed",
    "a data loader draws from the generator that dropout uses, and changes it after a resume",
    Replacement("torch.utils.data:DataLoader.__iter__", _preserve_rng_state),
)
