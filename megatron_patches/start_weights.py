"""The shared starting weights: with noise where they are written, and copied in before FSDP wraps.

A parameter that starts constant hides which part of it a rank uses, and where it is 0 how often.

Megatron-FSDP loads only its own checkpoint format, and its fresh weights depend on how it shards; torch
FSDP2 loads torch_dist, but only what a model of its own layout saved. Before wrapping, the model is an
ordinary one, and the shared start loads into it as into any other layout.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement, around
from parakit.config import variables


@around
def _loading_first(
    original: Callable[..., None],
    self: Any,
    config: Any,
    ddp_config: Any,
    module: torch.nn.Module,
    *args: Any,
    **kwargs: Any,
) -> None:
    from megatron.core import dist_checkpointing

    # Every rank takes its own shards, so a tensor-parallel model gets its part.
    checkpoint = Path(os.environ[variables.START_WEIGHTS])
    iteration = int((checkpoint / "latest_checkpointed_iteration.txt").read_text())
    wanted = {"model": module.sharded_state_dict()}  # type: ignore[operator]
    loaded = dist_checkpointing.load(wanted, str(checkpoint / f"iter_{iteration:07d}"))
    module.load_state_dict(loaded["model"], strict=True)
    original(self, config, ddp_config, module, *args, **kwargs)


@around
def _with_noise(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    answer = original(*args, **kwargs)
    for chunk in answer[0]:
        for name, held in (*chunk.named_parameters(), *chunk.named_buffers()):
            add_noise(name, held.data, os.environ[variables.START_NOISE])
    return answer


def add_noise(name: str, values: torch.Tensor, seed: str) -> None:
    """Add normal noise to floating values that are all the same; name and seed decide which."""
    constant = values.numel() > 1 and bool((values == values.flatten()[0]).all())
    if constant and values.is_floating_point():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = NOISE * torch.randn(values.shape, generator=generator)
        values += noise.to(values)


NOISE = 0.1
"""Of a norm's weight, which starts as 1: far above bf16's rounding, and a training's scale."""

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

WITH_NOISE = Patch(
    name="start_noise",
    reason="biases that start as 0 and norms as 1 hide which of their elements a rank uses",
    needed=lambda context: variables.START_NOISE in os.environ,
    replacements=(
        Replacement("megatron.training.training:setup_model_and_optimizer", _with_noise),
    ),
)
