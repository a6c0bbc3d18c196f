"""Several ranks on one GPU: each takes the one there is, and NCCL (2.30 and later) connects them.

NCCL's `init.cc` refuses two ranks on a device unless `NCCL_MULTI_RANK_GPU_ENABLE` is 1, which the
launcher sets. Memory, messages and losses are those of the strategy; times are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement, around


@around
def _to_existing(original: Callable[[Any], None], device: Any) -> None:
    """Rank 1's device is device 0 as well."""
    index = device if isinstance(device, int) else torch.device(device).index or 0
    original(index % torch.cuda.device_count())


PATCH = Patch(
    name="shared_device",
    reason="Megatron gives each rank of a machine a GPU of its own",
    needed=lambda context: context.shares_device,
    replacements=(Replacement("torch.cuda:set_device", _to_existing),),
)
