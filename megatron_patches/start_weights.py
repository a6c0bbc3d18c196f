"""The shared starting weights for FSDP, copied into the model before it is wrapped.

Megatron-FSDP loads only its own checkpoint format, and its fresh weights depend on how it shards; torch
FSDP2 loads torch_dist, but only what a model of its own layout saved. Before wrapping, the model is an
ordinary one, and the shared start loads into it as into any other layout.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement
from tools.spec import variables


def load_weights(module: torch.nn.Module, checkpoint: Path) -> None:
    """Copy a torch_dist checkpoint's weights into a model that is not wrapped yet.

    Every rank takes its own shards, so a tensor-parallel model gets its part.
    """
    from megatron.core import dist_checkpointing

    iteration = int((checkpoint / "latest_checkpointed_iteration.txt").read_text())
    wanted = {"model": module.sharded_state_dict()}  # type: ignore[operator]
    loaded = dist_checkpointing.load(wanted, str(checkpoint / f"iter_{iteration:07d}"))
    module.load_state_dict(loaded["model"], strict=True)


def _loading_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any, config: Any, ddp_config: Any, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        load_weights(module, Path(os.environ[variables.START_WEIGHTS]))
        original(self, config, ddp_config, module, *args, **kwargs)

    return init


PATCH = Patch(
    name="start_weights",
    reason="FSDP does not load the shared start that the other strategies load",
    needed=lambda context: variables.START_WEIGHTS in os.environ,
    replacements=(
        Replacement(
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__",
            _loading_first,
        ),
        Replacement(
            "megatron.core.distributed.torch_fully_sharded_data_parallel:"
            "TorchFullyShardedDataParallel.__init__",
            _loading_first,
        ),
    ),
)
