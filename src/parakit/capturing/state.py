"""Save and restore the state that a training step of any PyTorch program starts from, and perturb weights.

`TrainingState` holds copies of weights, buffers, optimizer states and random number generators, so that the
same step can be run several times. `perturb` changes every weight by one rounding error.
"""

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
    """Copy of the state of training at one moment: weights, buffers, optimizers and random numbers."""

    def __init__(self, held: Iterable[Tensor], *optimizers: Any) -> None:
        """Copy the current state.

        Args:
            held: Weights and buffers of the model.
            optimizers: All optimizers, whose states and parameter groups are copied, too.
        """
        tensors = list(held)
        self._states: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        """Each optimizer's dictionary of states, and a copy of it; the tensors in both are the same objects."""
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Each optimizer's parameter groups, and a copy of their settings."""
        for optimizer in optimizers:
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
            copied_states = {key: dict(state) for key, state in optimizer.state.items()}
            self._states.append((optimizer.state, copied_states))
            for group in optimizer.param_groups:
                settings = {key: value for key, value in group.items() if key != "params"}
                self._groups.append((group, settings))
        # The model and the optimizers keep their tensor objects: `restore` writes the old values into them.
        self._tensors: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            values = local_tensor(tensor).detach()
            self._tensors.append((values, values.clone()))
        self._python_random = random.getstate()
        self._numpy_random = numpy.random.get_state()
        self._torch_random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all()

    def restore(self) -> None:
        """Write the copied state back into the model, the optimizers and the random number generators."""
        for tensor, saved_values in self._tensors:
            tensor.copy_(saved_values)
        for states, saved_states in self._states:
            # If the copy was made before the first step, the optimizer has created its states since then.
            states.clear()
            states.update({key: dict(state) for key, state in saved_states.items()})
        for group, settings in self._groups:
            group.update(settings)
        random.setstate(self._python_random)
        numpy.random.set_state(self._numpy_random)
        torch.set_rng_state(self._torch_random)
        torch.cuda.set_rng_state_all(self._cuda_random)


def perturb(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Multiply every element of the weights in place by 1 + ε or 1 − ε. ε is the epsilon of the weight's dtype.

    Args:
        weights: Names and values. The name is the seed of the weight's random signs, so equal names get
            equal signs.
    """
    with torch.no_grad():
        for name, values in weights:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            signs = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8) * 2 - 1
            # The signs become at least fp32. In fp32, 1 plus the epsilon of fp64 would round to 1, so fp64
            # weights need fp64 signs.
            signs = signs.to(values.device, torch.promote_types(values.dtype, torch.float32))
            values.mul_(1 + torch.finfo(values.dtype).eps * signs)


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's local part of a DTensor; any other tensor is returned unchanged."""
    return value._local_tensor if isinstance(value, DTensor) else value
