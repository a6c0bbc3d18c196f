"""What a training step of any PyTorch program begins with: put back, or off by one rounding error."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class TrainingState:
    """Weights, buffers, states of torch's optimizers and random numbers, to begin a step again."""

    def __init__(self, held: Iterable[Tensor], *optimizers: Any) -> None:
        """Of weights and buffers, and of all that the optimizers keep."""
        kept = (
            value for one in optimizers for state in one.state.values() for value in state.values()
        )
        tensors = (*held, *(value for value in kept if isinstance(value, Tensor)))
        # What holds one of these tensors goes on holding it: their values are put back.
        self._tensors = [
            (one, one.clone()) for one in (local_tensor(each).detach() for each in tensors)
        ]
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


def perturb(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Multiply weights by one plus or minus their type's epsilon; signs follow from a weight's name."""
    with torch.no_grad():
        for name, values in weights:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            signs = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8) * 2 - 1
            # In fp32 at least; one plus the epsilon of fp64 is one in fp32.
            signed = signs.to(values.device, torch.promote_types(values.dtype, torch.float32))
            values.mul_(1 + torch.finfo(values.dtype).eps * signed)


def local_tensor(value: Tensor) -> Tensor:
    """A rank's own part of a distributed tensor; any other as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value
