"""Repeats an iteration with weights changed by one rounding error, to see how far each tensor follows.

Source of the idea: TTrace (arXiv:2506.09280), whose tolerance is the response of a tensor to a change of
its input by the machine's epsilon.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from megatron_patches.capture.parameters import ParameterMap


class Snapshot:
    """Everything an iteration changes, to begin the same iteration again."""

    def __init__(self, chunks: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._tensors = [(one, one.detach().clone()) for one in _tensors(chunks, optimizer)]
        self._groups = [
            (group, {key: value for key, value in group.items() if key != "params"})
            for one in _optimizers(optimizer)
            for group in one.param_groups
        ]
        self._keys = [(one, set(one.state)) for one in map(_inner, _optimizers(optimizer))]
        self._schedule = dict(vars(scheduler))
        self._random = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._tracked = _tracker().get_states()

    def restore(self) -> None:
        """Put all of it back."""
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)
        for inner, keys in self._keys:
            for key in set(inner.state) - keys:  # The first step makes them.
                del inner.state[key]
        for group, values in self._groups:
            group.update(values)
        vars(self._scheduler).update(self._schedule)
        random.setstate(self._random[0])
        numpy.random.set_state(self._random[1])
        torch.set_rng_state(self._random[2])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        _tracker().set_states(self._tracked)


def perturb(parameters: ParameterMap, seed: str) -> None:
    """Multiply every weight by one plus or minus its type's epsilon.

    Copies of a weight on several ranks change alike: signs follow from its place in the whole model.
    """
    with torch.no_grad():
        for parameter in parameters.parameters:
            epsilon = torch.finfo(parameter.dtype).eps
            for piece in parameters.pieces(parameter, parameter.data):
                name = f"{seed} {piece.placement.key} {piece.placement.global_offset}"
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                shape = piece.values.shape
                signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1
                change = (1 + epsilon * signs.float()).to(piece.values.device)
                piece.values.copy_((piece.values.float() * change).to(piece.values.dtype))


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _tensors(chunks: list[torch.nn.Module], optimizer: Any) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        yield from (parameter.data for parameter in chunk.parameters())
        yield from chunk.buffers()
    for one in _optimizers(optimizer):
        inner = _inner(one)
        for group in one.param_groups:
            yield from (held.data for held in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
