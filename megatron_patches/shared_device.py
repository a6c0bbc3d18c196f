"""Several ranks on one GPU: their messages go through host memory.

NCCL refuses two ranks on a device, and gloo has no CUDA send, receive or all-gather. Every call ends
in a method of the process group, so each method copies its tensors to the host, lets gloo exchange
those, and copies the results back. Memory and losses are those of the strategy; times are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_patches.registry import Patch, Replacement, around
from tools.ledger.process_groups import METHODS

_MESSAGES = ("send", "recv", "recv_anysource")
"""Two ranks that both send first would wait for each other for ever, so these return before the wait."""


class Staged:
    """A call on host copies; waiting for it brings the results to the device."""

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._work = work
        self._pairs = pairs

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Wait for gloo, then copy what it received."""
        done = True if self._work is None else bool(self._work.wait(*args, **kwargs))
        for target, received in self._pairs:
            target.copy_(received)
        self._pairs = []
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def stage(name: str, original: Callable[..., Any], device: str) -> Callable[..., Any]:
    """A process group's method that copies tensors of this kind of device to the host and back."""

    @functools.wraps(original, updated=())
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(tensor.device.type == device for tensor in _tensors((args, kwargs))):
            return original(group, *args, **kwargs)
        pairs: list[tuple[Tensor, Tensor]] = []
        # A call fills its first argument, but for a send; only what is filled is copied back.
        filled = [] if name == "send" else pairs
        staged = [_copied(value, device, [] if n else filled) for n, value in enumerate(args)]
        named = {key: _copied(value, device, []) for key, value in kwargs.items()}
        work = Staged(original(group, *staged, **named), pairs)
        if name not in _MESSAGES:
            work.wait()
        return work

    return call


def _copied(value: Any, device: str, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    if isinstance(value, Tensor):
        if value.device.type != device:
            return value
        # A clone also where the device is the host, as in the tests.
        host = value.detach().to("cpu", copy=True).contiguous()
        pairs.append((value.detach(), host))
        return host
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, device, pairs) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@around
def _to_existing(original: Callable[[Any], None], device: Any) -> None:
    """Rank 1's device is device 0 as well."""
    index = device if isinstance(device, int) else torch.device(device).index or 0
    original(index % torch.cuda.device_count())


_METHODS = tuple(name for name in METHODS if name != "barrier")
"""Every method that moves tensors."""

PATCH = Patch(
    name="shared_device",
    reason="NCCL refuses two ranks on a GPU, and gloo lacks most of its calls there",
    needed=lambda context: context.shares_device,
    replacements=(
        Replacement("torch.cuda:set_device", _to_existing),
        *(
            Replacement(
                f"torch.distributed:ProcessGroup.{name}",
                functools.partial(stage, name, device="cuda"),
            )
            for name in _METHODS
        ),
    ),
)
