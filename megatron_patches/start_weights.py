"""Load the shared initial weights into models that FSDP wraps, and add noise to constant parameters.

All strategies of a comparison begin with the weights of one checkpoint, the shared initial checkpoint.

`PATCH` replaces `FullyShardedDataParallel.__init__` (Megatron-FSDP) and `TorchFullyShardedDataParallel.__init__`
(torch FSDP2), and loads that checkpoint before the model is wrapped. Without the patch, both would begin with
weights of their own: Megatron-FSDP loads only its own checkpoint format, and its fresh weights depend on how it
shards. torch FSDP2 loads torch_dist, but only what a model of the same strategy saved. Before it is wrapped, the
model loads the checkpoint as any other.

`WITH_NOISE` replaces `setup_model_and_optimizer` where the shared initial checkpoint is written, and adds
noise to every parameter and buffer with equal elements. Without it, biases begin as 0 and norms as 1, and
a comparison would not notice that a rank uses the wrong elements of them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement, wrap_original
from parakit.config import variables


@wrap_original
def _load_before_wrapping(
    original: Callable[..., None],
    self: Any,
    config: Any,
    ddp_config: Any,
    module: torch.nn.Module,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Load the shared initial weights into `module`, then wrap it.

    The folder of the checkpoint is in the environment variable `variables.START_WEIGHTS`. Every rank
    loads its own shards, so a tensor-parallel model gets its part.
    """
    from megatron.core import dist_checkpointing

    checkpoint = Path(os.environ[variables.START_WEIGHTS])
    iteration = int((checkpoint / "latest_checkpointed_iteration.txt").read_text())
    sharded_state = {"model": module.sharded_state_dict()}  # type: ignore[operator]
    loaded = dist_checkpointing.load(sharded_state, str(checkpoint / f"iter_{iteration:07d}"))
    module.load_state_dict(loaded["model"], strict=True)
    original(self, config, ddp_config, module, *args, **kwargs)


@wrap_original
def _add_noise_to_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build model and optimizer, add noise to constant parameters and buffers, and return the result.

    The seed is in the environment variable `variables.START_NOISE`.
    """
    result = original(*args, **kwargs)
    model_chunks = result[0]
    for chunk in model_chunks:
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            add_noise(name, tensor.data, os.environ[variables.START_NOISE])
    return result


def add_noise(name: str, values: torch.Tensor, seed: str) -> None:
    """Add normal noise in place to floating values that are all equal; change nothing else.

    The noise depends on `name` and `seed` alone. A single value is not changed.
    """
    is_constant = values.numel() > 1 and bool((values == values.flatten()[0]).all())
    if is_constant and values.is_floating_point():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = NOISE * torch.randn(values.shape, generator=generator)
        values += noise.to(values)


NOISE = 0.1
"""Standard deviation of the noise. Relative to a norm's weight, which begins as 1, this is far above the
rounding of bf16 and about as large as the changes that training makes."""

PATCH = Patch(
    name="start_weights",
    reason="FSDP does not load the shared start that the other strategies load",
    needed=lambda context: variables.START_WEIGHTS in os.environ,
    replacements=(
        Replacement(
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__",
            _load_before_wrapping,
        ),
        Replacement(
            "megatron.core.distributed.torch_fully_sharded_data_parallel:"
            "TorchFullyShardedDataParallel.__init__",
            _load_before_wrapping,
        ),
    ),
)

WITH_NOISE = Patch(
    name="start_noise",
    reason="biases that start as 0 and norms as 1 hide which of their elements a rank uses",
    needed=lambda context: variables.START_NOISE in os.environ,
    replacements=(
        Replacement("megatron.training.training:setup_model_and_optimizer", _add_noise_to_model),
    ),
)
