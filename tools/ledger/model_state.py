"""Where a model's weights, gradients and optimizer state lie, in Megatron and in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def weights_of(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters, as the model computes with them."""
    for model in models:
        yield from (parameter.detach() for parameter in model.parameters())


def gradients_of(models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Gradients: Megatron's `main_grad`, which views one buffer of the replica, or `grad`."""
    for model in models:
        for parameter in model.parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                yield gradient


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """State of every optimizer that is chained or wrapped, and the fp32 copies it updates."""
    for inner in _plain_optimizers(optimizer):
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    for wrapper in _chain(optimizer):
        for groups in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(wrapper, groups, ()):
                yield from (copy for copy in group if copy is not None)


def _chain(optimizer: Any) -> tuple[Any, ...]:
    return tuple(getattr(optimizer, "chained_optimizers", (optimizer,)))


def _plain_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for wrapper in _chain(optimizer):
        inner = getattr(wrapper, "optimizer", wrapper)
        if isinstance(inner, torch.optim.Optimizer):
            yield inner
