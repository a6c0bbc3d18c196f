"""torch.cuda on a machine without a GPU: each rank's one device is its own process.

Megatron asks torch.cuda for devices, streams, events, memory and random state. Here each answers for the
host: work is always in order, and the device's random generator is the CPU's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_patches.registry import Replacement, cpu_patch

DEVICE_INDEX = 0
"""Every rank sees itself as device 0; an int, because Megatron indexes `default_generators` with it."""


class CpuStream(torch.cpu.Stream):
    """torch's stream of the host, where everything runs in order, with the rest of a CUDA stream's
    interface.
    """

    device = torch.device("cpu")
    device_index = DEVICE_INDEX
    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:  # type: ignore[override]
        """Record the present moment."""
        event = event or CpuEvent()
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


class CpuEvent(torch.cpu.Event):
    """torch's event of the host, which has always happened, on the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: CpuStream | None = None) -> None:  # noqa: ARG002 - torch's signature
        """Take the present time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: CpuEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1000


def _returning(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """A function that returns the same value for every call."""
    return lambda _: lambda *args, **kwargs: value


def _replaced_by(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _get_rng_state(device: Any = None) -> torch.Tensor:  # noqa: ARG001 - torch's signature
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG001
    torch.set_rng_state(new_state)


@contextlib.contextmanager
def _empty_context(*_: Any, **__: Any) -> Iterator[None]:
    yield


_PROPERTIES = SimpleNamespace(
    name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=os.cpu_count() or 1
)

_STREAM = CpuStream()

_FIGURES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_TENSOR_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor")
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "is_available": _returning(True),
    "is_initialized": _returning(True),
    "device_count": lambda _: _local_ranks,
    "current_device": _returning(DEVICE_INDEX),
    "get_device_name": _returning("cpu"),
    "get_device_capability": _returning((0, 0)),
    "get_device_properties": _returning(_PROPERTIES),
    "Stream": _replaced_by(CpuStream),
    "Event": _replaced_by(CpuEvent),
    "current_stream": _returning(_STREAM),
    "default_stream": _returning(_STREAM),
    "stream": _replaced_by(_empty_context),
    "device": _replaced_by(_empty_context),
    "get_rng_state": _replaced_by(_get_rng_state),
    "set_rng_state": _replaced_by(_set_rng_state),
    "random.get_rng_state": _replaced_by(_get_rng_state),
    "random.set_rng_state": _replaced_by(_set_rng_state),
    "manual_seed": _replaced_by(torch.default_generator.manual_seed),
    "manual_seed_all": _replaced_by(torch.default_generator.manual_seed),
    "default_generators": _replaced_by((torch.default_generator,)),
    "_lazy_call": lambda _: lambda function, **kwargs: function(),
    "is_current_stream_capturing": _returning(False),
    "mem_get_info": _returning((0, 0)),
    **dict.fromkeys(_FIGURES, _returning(0)),
    "memory_stats": _returning(Counter()),
    **{name: _replaced_by(getattr(torch, name)) for name in _TENSOR_TYPES},
}
_NO_OPERATIONS = (
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

PATCH = cpu_patch(
    "fake_cuda",
    "Megatron asks torch.cuda for its device; on CPU ranks the process is the device",
    *(Replacement(f"torch.cuda:{name}", make) for name, make in _REPLACEMENTS.items()),
    *(Replacement(f"torch.cuda:{name}", _returning(None)) for name in _NO_OPERATIONS),
    # torch's own optimizers and collectives look here, and must not find a GPU.
    Replacement("torch.accelerator:is_available", _returning(False)),
    Replacement("torch.accelerator:current_accelerator", _returning(None)),
)
