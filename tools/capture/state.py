"""What a training step of any PyTorch program begins with: put back, or off by one rounding error."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that `torch.compile` and activation checkpointing add."""


class State:
    """Weights, buffers, optimizer state and random numbers, to begin a step again."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._held = (*model.parameters(), *model.buffers())
        self._values = [local(one).detach().clone() for one in self._held]
        self._optimizer = optimizer
        self._state = {one: _copied(state) for one, state in optimizer.state.items()}
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state_all()

    def restore(self) -> None:
        """Put all of it back."""
        with torch.no_grad():
            for one, value in zip(self._held, self._values, strict=True):
                local(one).copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update({one: _copied(state) for one, state in self._state.items()})
        torch.set_rng_state(self._random[0])
        torch.cuda.set_rng_state_all(self._random[1])


def perturb(model: nn.Module, seed: int) -> None:
    """Multiply every weight by one plus or minus its type's epsilon, on all that hold a part alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = local(parameter)
            signed = f"{seed} {plain_name(name)}".encode()
            generator = torch.Generator().manual_seed(zlib.crc32(signed))
            signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
            values.mul_(1 + torch.finfo(values.dtype).eps * signs.to(values.device))


def plain_name(name: str) -> str:
    """The name that the program gave, without what wraps it."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def local(value: Tensor) -> Tensor:
    """A rank's own part of a distributed tensor; any other as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: one.clone() if isinstance(one, Tensor) else one for key, one in state.items()}
