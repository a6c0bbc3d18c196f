"""Place several ranks on one GPU (`SHARE_GPU=1`).

Target: `torch.cuda.set_device`. Megatron gives each rank of a machine the GPU with the rank's local
number. Without the patch, rank 1 on a machine with one GPU would fail, because GPU 1 does not exist.

NCCL 2.30 and later can connect the ranks: its `init.cc` refuses two ranks on a device unless
`NCCL_MULTI_RANK_GPU_ENABLE` is 1, which the launcher sets. Memory, messages and losses are those of the
strategy on several GPUs; times are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement, wrap_original


@wrap_original
def _set_existing_device(original: Callable[[Any], None], device: Any) -> None:
    """Set the device whose number is the requested one modulo the number of GPUs."""
    index = device if isinstance(device, int) else torch.device(device).index or 0
    original(index % torch.cuda.device_count())


PATCH = Patch(
    name="shared_device",
    reason="Megatron gives each rank of a machine a GPU of its own",
    needed=lambda context: context.shares_device,
    replacements=(Replacement("torch.cuda:set_device", _set_existing_device),),
)
