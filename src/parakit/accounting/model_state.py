"""Find the tensors of a model's weights, gradients and optimizer state, of Megatron and of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch


def model_weights(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters with which the models compute. Under Megatron-FSDP, yield its weight buffers.

    A native pipeline without flushes also yields its older versions of the weights. Weights that FSDP has
    gathered for the present layer are temporary, and are not yielded.
    """
    for model in models:
        if is_megatron_fsdp(model):
            yield from _fsdp_buffers(model, "model_weight_buffer")
        else:
            yield from (parameter.detach() for parameter in model.parameters())
            # A native pipeline without flushes keeps older versions of the weights too.
            yield from chain.from_iterable(getattr(model, "weight_versions", ()))


def model_gradients(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the gradient of each parameter that has a gradient. Under Megatron-FSDP, yield its gradient buffers.

    Megatron's gradients are views of one buffer per model chunk.
    """
    for model in models:
        if is_megatron_fsdp(model):
            yield from _fsdp_buffers(model, "main_grad_buffer")
            continue
        for parameter in model.parameters():
            gradient = parameter_gradient(parameter)
            if gradient is not None:
                yield gradient


def parameter_gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that the optimizer uses: Megatron's `main_grad`, else `grad`; None without."""
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def model_master_weights(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the buffers of weights that Megatron-FSDP's optimizer updates; other models have none.

    Megatron-FSDP has such buffers in fp32 as well.
    """
    for model in models:
        yield from _fsdp_buffers(model, "main_weight_buffer")


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the state tensors of all chained or wrapped optimizers, and the fp32 main weights that they update."""
    for inner in _torch_optimizers(optimizer):
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    for wrapper in list_optimizers(optimizer):
        for attribute in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(wrapper, attribute, ()):
                yield from (main_weight for main_weight in group if main_weight is not None)


def has_optimizer_state(optimizer: Any) -> bool:
    """Return True once the optimizer has state, which its first update creates."""
    return any(inner.state for inner in _torch_optimizers(optimizer))


def is_megatron_fsdp(model: torch.nn.Module) -> bool:
    """Return True if Megatron-FSDP wraps the model."""
    return hasattr(model, "param_and_grad_buffer")


def _fsdp_buffers(model: torch.nn.Module, name: str) -> Iterator[torch.Tensor]:
    """Yield the flat buffers that Megatron-FSDP has under the attribute `name`; nothing for another model.

    If the sharding splits these tensors, a buffer is the rank's shard. Otherwise it holds the full tensors.
    """
    buffers = getattr(model, "param_and_grad_buffer", None)
    for group in getattr(buffers, "parameter_groups", ()):
        buffer = getattr(group, name)
        if buffer is not None and buffer.data is not None:
            yield buffer.data


def list_optimizers(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers of a chained optimizer, or the given optimizer alone."""
    return tuple(getattr(optimizer, "chained_optimizers", (optimizer,)))


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield PyTorch's optimizers inside of Megatron's chained and wrapped ones."""
    for wrapper in list_optimizers(optimizer):
        inner = getattr(wrapper, "optimizer", wrapper)
        if isinstance(inner, torch.optim.Optimizer):
            yield inner
