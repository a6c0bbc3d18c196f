"""What a training step of any PyTorch program begins with: put back, or off by one rounding error."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that `torch.compile` and activation checkpointing add."""


class State:
    """Weights, buffers, states of torch's optimizers and random numbers, to begin a step again."""

    def __init__(self, held: Iterable[Tensor], *optimizers: Any) -> None:
        """Of weights and buffers, and of all that the optimizers keep."""
        kept = (
            value for one in optimizers for state in one.state.values() for value in state.values()
        )
        tensors = (*held, *(value for value in kept if isinstance(value, Tensor)))
        # What holds one of these tensors goes on holding it: their values are put back.
        self._tensors = [(one, one.clone()) for one in (local(each).detach() for each in tensors)]
        self._states = [
            (one.state, {key: dict(state) for key, state in one.state.items()})
            for one in optimizers
        ]
        self._groups = [
            (group, {key: value for key, value in group.items() if key != "params"})
            for one in optimizers
            for group in one.param_groups
        ]
        self._random = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all()

    def restore(self) -> None:
        """Put all of it back."""
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for states, kept in self._states:
            states.clear()  # The first step makes them.
            states.update({key: dict(state) for key, state in kept.items()})
        for group, values in self._groups:
            group.update(values)
        random.setstate(self._random[0])
        numpy.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        torch.cuda.set_rng_state_all(self._cuda)


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
