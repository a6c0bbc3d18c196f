"""Why `FUSED=` (patches for GPUs without Transformer Engine) or `SHARE_GPU=1` cannot be had."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tools.launch.compose import Launch
from tools.launch.devices import visible_gpus
from tools.launch.flags import FSDP
from tools.spec.run import Backend, DeviceKind

RESET_MASK = "--reset-attention-mask"


def fused_problems(launch: Launch) -> Iterator[str]:
    """Why the patches that are asked for do not fit the run, a sentence each."""
    asked = launch.environment.get("KIT_FUSED")
    if not asked:
        return
    if launch.spec.backend is not Backend.MEGATRON:
        yield f"FUSED={asked} changes Megatron, and BACKEND={launch.spec.backend} trains without it."
    elif launch.runtime.transformer_engine:
        yield (
            f"FUSED={asked} replaces what Transformer Engine does, and this runtime has it; set "
            "RUNTIME=host with a torch that it is not installed for, or leave FUSED= out."
        )
    if "gradient_gemm" in asked.split(",") and launch.spec.parallelism.sharding in FSDP:
        yield (
            f"FUSED=gradient_gemm adds to gradient buffers that {launch.spec.name} does not have; "
            "leave it out."
        )
    if "attention_flash" in asked.split(",") and launch.spec.parallelism.context > 1:
        yield (
            f"FUSED=attention_flash takes no mask, and {launch.spec.name} masks by position; leave it "
            "out, or name attention_cudnn."
        )


def attention_problems(launch: Launch) -> Iterator[str]:
    """Why attention on SDPA would not be what the flags say, a sentence."""
    own = launch.spec.device is DeviceKind.GPU and not launch.runtime.transformer_engine
    if own and launch.spec.backend is Backend.MEGATRON and RESET_MASK in launch.flags:
        yield (
            f"{RESET_MASK} masks documents from one another, and attention without Transformer Engine "
            "is causal over the whole sequence on GPUs; leave it out."
        )


def sharing_problems(launch: Launch) -> Iterator[str]:
    """Why the ranks cannot share a GPU, a sentence each."""
    if not launch.spec.shares_gpu:
        return
    if launch.spec.device is not DeviceKind.GPU:
        yield "SHARE_GPU=1 puts GPU ranks on one device; CPU ranks need nothing of the kind."
    elif launch.devices == 1:
        yield "SHARE_GPU=1 is for several ranks on one GPU, and this run has one rank; leave it out."
    elif launch.nodes is not None:
        yield "SHARE_GPU=1 is for one machine; leave NNODES= and LAUNCHER= out."
    elif launch.runtime.container is not None:
        yield "SHARE_GPU=1 stages transfers in the patches of the host runtime; set RUNTIME=host."
    elif len(visible_gpus()) != 1:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
        yield (
            f"SHARE_GPU=1 needs exactly one visible GPU and {len(visible_gpus())} are{shown}; choose "
            "one with CUDA_VISIBLE_DEVICES=, or leave it out."
        )
    if launch.spec.backend is not Backend.MEGATRON:
        yield f"SHARE_GPU=1 patches Megatron's groups, and BACKEND={launch.spec.backend} has its own."
