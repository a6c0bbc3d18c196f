"""Where Megatron and plain PyTorch keep a model's weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch


def model_weights(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters as the model computes with them; under Megatron-FSDP its own buffers of them.

    What FSDP has gathered at the moment is not counted: it is temporary.
    """
    for model in models:
        if is_megatron_fsdp(model):
            yield from _fsdp_buffers(model, "model_weight_buffer")
        else:
            yield from (parameter.detach() for parameter in model.parameters())
            # Of a native pipeline without flushes: the newest is the parameters'.
            yield from chain.from_iterable(getattr(model, "weight_versions", ()))


def model_gradients(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Gradients; Megatron's view one buffer of the replica, or are Megatron-FSDP's buffers."""
    for model in models:
        yield from _fsdp_buffers(model, "main_grad_buffer")
        for parameter in () if is_megatron_fsdp(model) else model.parameters():
            gradient = parameter_gradient(parameter)
            if gradient is not None:
                yield gradient


def parameter_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What the optimizer is given: Megatron's `main_grad`, or `grad`."""
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def model_master_weights(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """The copy of the weights that Megatron-FSDP's optimizer updates; in fp32 it keeps one too."""
    for model in models:
        yield from _fsdp_buffers(model, "main_weight_buffer")


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """State of every optimizer that is chained or wrapped, and the fp32 copies it updates."""
    for inner in _plain_optimizers(optimizer):
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    for wrapper in list_optimizers(optimizer):
        for groups in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(wrapper, groups, ()):
                yield from (copy for copy in group if copy is not None)


def has_optimizer_state(optimizer: Any) -> bool:
    """Whether it has made its state, which the first update that is not skipped does."""
    return any(inner.state for inner in _plain_optimizers(optimizer))


def is_megatron_fsdp(model: torch.nn.Module) -> bool:
    """Whether Megatron-FSDP wraps it."""
    return hasattr(model, "param_and_grad_buffer")


def _fsdp_buffers(model: torch.nn.Module, name: str) -> Iterator[torch.Tensor]:
    """Megatron-FSDP's flat buffers: the rank's shard where the stage shards them, else the whole."""
    buffers = getattr(model, "param_and_grad_buffer", None)
    for group in getattr(buffers, "parameter_groups", ()):
        buffer = getattr(group, name)
        if buffer is not None and buffer.data is not None:
            yield buffer.data


def list_optimizers(optimizer: Any) -> tuple[Any, ...]:
    """Those that Megatron has chained, or the one."""
    return tuple(getattr(optimizer, "chained_optimizers", (optimizer,)))


def _plain_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for wrapper in list_optimizers(optimizer):
        inner = getattr(wrapper, "optimizer", wrapper)
        if isinstance(inner, torch.optim.Optimizer):
            yield inner
