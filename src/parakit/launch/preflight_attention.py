"""Refuse flags that attention without Transformer Engine would ignore, before a run starts.

CPU ranks, and GPU ranks without Transformer Engine, compute attention with Megatron's own layers and the
kit's patch (`megatron_patches/no_te/attention.py`): CPU ranks with explicit scores, GPU ranks with PyTorch's
attention. Under context parallelism the patch gathers keys and values, and gathers them again in backward, as
Transformer Engine does for `--cp-comm-type all_gather`. The ring of `p2p`, Megatron's default, sends the same
bytes, so the default is let through.
"""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.flags import Flags
from parakit.config.run import Backend, DeviceKind
from parakit.launch.compose import Launch

RESET_MASK = "--reset-attention-mask"
_COMM_TYPE, _ATTENTION_BACKEND = "--cp-comm-type", "--attention-backend"
_COMM_TYPES_COMPUTED = ("p2p", "all_gather", "allgather")
"""Values of `--cp-comm-type` that the patch replaces; Megatron's help spells the last one."""
_BACKENDS_COMPUTED = ("auto", "unfused")
"""Values of `--attention-backend` that Megatron's own attention replaces, which stores its scores."""
_IGNORED = ("--flash-attention-version",)
_IGNORED_UNDER_CONTEXT = ("--hierarchical-context-parallel-sizes",)
_NOT_COMPUTED_UNDER_CONTEXT = ("--window-size", "--softmax-type")
"""Flags that Megatron's own attention follows and the patch ignores."""


def attention_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence for each flag that attention without Transformer Engine would ignore."""
    on_gpu = launch.spec.device is DeviceKind.GPU
    has_transformer_engine = on_gpu and launch.runtime.transformer_engine
    if launch.spec.backend is not Backend.MEGATRON or has_transformer_engine:
        return
    if on_gpu and RESET_MASK in launch.flags:
        yield (
            f"{RESET_MASK} masks documents from one another, and attention without Transformer Engine "
            "is causal over the whole sequence on GPUs; leave it out."
        )
    flags, context = Flags(launch.flags), launch.spec.parallelism.context
    remedy = f"{_name_way_to_transformer_engine(launch)}, or leave the flag out."
    for name in _list_ignored_flags(flags, context, on_gpu=on_gpu):
        value = " ".join(flags.texts(name))
        yield (
            f"{name} {value} chooses how Transformer Engine computes attention; the attention here is "
            f"computed without it ({_describe_attention(launch)}), whatever the flag says; {remedy}"
        )
    if context == 1:
        return
    for name in _NOT_COMPUTED_UNDER_CONTEXT:
        values = flags.texts(name)
        # `--softmax-type vanilla` is the default.
        if values and values != ["vanilla"]:
            yield (
                f"{name} {' '.join(values)} is not computed under context parallelism without "
                f"Transformer Engine, which is plain causal attention; {remedy}"
            )


def _describe_attention(launch: Launch) -> str:
    """Return how attention is computed without Transformer Engine, as a part of a sentence."""
    on_gpu = launch.spec.device is DeviceKind.GPU
    computed_by = (
        "by PyTorch's attention" if on_gpu else "by Megatron's own layers, with explicit scores"
    )
    if launch.spec.parallelism.context > 1:
        return f"keys and values are gathered, as all_gather does; {computed_by}"
    return computed_by


def _name_way_to_transformer_engine(launch: Launch) -> str:
    """Return what to do in order to train with Transformer Engine, the start of a remedy."""
    if launch.spec.device is DeviceKind.GPU:
        return "set RUNTIME=docker, whose image has Transformer Engine"
    return "train on GPUs with Transformer Engine (a target that ends in gpu)"


def _list_ignored_flags(flags: Flags, context: int, *, on_gpu: bool) -> Iterator[str]:
    """Yield the names of the flags that would change nothing with their values.

    `context` is the context-parallel size.
    """
    is_split = context > 1
    # On GPUs the patch of context parallelism computes attention fused.
    computed_backends = {"auto"} if is_split and on_gpu else set(_BACKENDS_COMPUTED)
    if not computed_backends.issuperset(flags.texts(_ATTENTION_BACKEND)):
        yield _ATTENTION_BACKEND
    if is_split and not set(_COMM_TYPES_COMPUTED).issuperset(flags.texts(_COMM_TYPE)):
        yield _COMM_TYPE
    for name in _IGNORED:
        if flags.has(name):
            yield name
    if is_split:
        for name in _IGNORED_UNDER_CONTEXT:
            if flags.has(name):
                yield name
