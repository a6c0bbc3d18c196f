"""torch.cuda on a machine without a GPU: each rank's one device is its own process.

Megatron asks torch.cuda for devices, streams, events, memory and random state everywhere. Here each
of these answers for the host: streams are in order by nature, the device generator is the CPU's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_patches.registry import Patch, Replacement

DEVICE_INDEX = 0
"""Every rank sees itself as device 0; an int, because Megatron indexes `default_generators` with it."""


class HostStream:
    """A CUDA stream's interface where everything already runs in order."""

    device = torch.device("cpu")
    device_index = DEVICE_INDEX
    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: HostStream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: HostEvent) -> None:
        """Nothing to wait for."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record the present moment."""
        event = event or HostEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """One priority."""
        return (0, 0)


class HostEvent:
    """A CUDA event's interface on the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: HostStream | None = None) -> None:  # noqa: ARG002 - torch's signature
        """Take the present time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: HostStream | None = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """The event has happened."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1000


def _always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """A replacement that answers every call with the same value."""
    return lambda _: lambda *args, **kwargs: value


def _instead(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _get_rng_state(device: Any = None) -> torch.Tensor:  # noqa: ARG001 - torch's signature
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG001
    torch.set_rng_state(new_state)


@contextlib.contextmanager
def _no_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


_PROPERTIES = SimpleNamespace(
    name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=os.cpu_count() or 1
)

_STREAM = HostStream()

_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "is_available": _always(True),
    "is_initialized": _always(True),
    "device_count": lambda _: _ranks_here,
    "current_device": _always(DEVICE_INDEX),
    "get_device_name": _always("cpu"),
    "get_device_capability": _always((0, 0)),
    "get_device_properties": _always(_PROPERTIES),
    "Stream": _instead(HostStream),
    "Event": _instead(HostEvent),
    "current_stream": _always(_STREAM),
    "default_stream": _always(_STREAM),
    "stream": _instead(_no_context),
    "device": _instead(_no_context),
    "get_rng_state": _instead(_get_rng_state),
    "set_rng_state": _instead(_set_rng_state),
    "random.get_rng_state": _instead(_get_rng_state),
    "random.set_rng_state": _instead(_set_rng_state),
    "manual_seed": _instead(torch.default_generator.manual_seed),
    "manual_seed_all": _instead(torch.default_generator.manual_seed),
    "default_generators": _instead((torch.default_generator,)),
    "_lazy_call": lambda _: lambda function, **kwargs: function(),
    "is_current_stream_capturing": _always(False),
    "mem_get_info": _always((0, 0)),
    "memory_allocated": _always(0),
    "memory_reserved": _always(0),
    "max_memory_allocated": _always(0),
    "max_memory_reserved": _always(0),
    "memory_stats": _always({}),
    "FloatTensor": _instead(torch.FloatTensor),
    "HalfTensor": _instead(torch.HalfTensor),
    "BFloat16Tensor": _instead(torch.BFloat16Tensor),
    "LongTensor": _instead(torch.LongTensor),
    "IntTensor": _instead(torch.IntTensor),
}
_NOTHING_TO_DO = (
    "_lazy_init",
    "set_device",
    "set_stream",
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "check_error",
    "nvtx.range_push",
    "nvtx.range_pop",
    "_sleep",
)

PATCH = Patch(
    name="host_device",
    reason="Megatron asks torch.cuda for its device; on CPU ranks the process is the device",
    needed=lambda situation: situation.on_cpu,
    replacements=(
        *(Replacement(f"torch.cuda:{name}", make) for name, make in _ANSWERS.items()),
        *(Replacement(f"torch.cuda:{name}", _always(None)) for name in _NOTHING_TO_DO),
        # torch's own optimizers and collectives ask here, and would believe torch.cuda above.
        Replacement("torch.accelerator:is_available", _always(False)),
        Replacement("torch.accelerator:current_accelerator", _always(None)),
    ),
)
