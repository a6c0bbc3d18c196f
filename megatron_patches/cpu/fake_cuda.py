"""Answer torch.cuda on a machine without a GPU: each rank's only device is its own process.

Targets: the functions of `torch.cuda` that Megatron calls for devices, streams, events, memory and random
state, and two of `torch.accelerator`. Without the patch, Megatron would stop at its first question for a
device. The answers describe the host: work is always in order, and the device's random generator is the
CPU's.
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
"""Number of each rank's device. It is a number because Megatron indexes `default_generators` with it."""


class CpuStream(torch.cpu.Stream):
    """A stream of the host, on which everything runs in order, with the interface of a CUDA stream."""

    device = torch.device("cpu")
    device_index = DEVICE_INDEX
    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:  # type: ignore[override]
        """Record the current time in `event`, or in a new event, and return it."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return at once, because the host has no work in flight."""

    def query(self) -> bool:
        """Return True, because all work is done."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return (0, 0), the range of a single priority."""
        return (0, 0)


class CpuEvent(torch.cpu.Event):
    """An event of the host. It has always happened, and takes its time from the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: CpuStream | None = None) -> None:  # noqa: ARG002 - torch's signature
        """Record the current time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: CpuEvent) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1000


def _make_constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return a `Replacement.make` for a function that ignores its arguments and returns `value`."""
    return lambda _: lambda *args, **kwargs: value


def _replace_by(value: Any) -> Callable[[Any], Any]:
    """Return a `Replacement.make` that ignores the original and gives `value`."""
    return lambda _: value


def _count_local_ranks() -> int:
    """Return the number of ranks on this machine, the number of devices that Megatron sees."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _get_rng_state(device: Any = None) -> torch.Tensor:  # noqa: ARG001 - torch's signature
    """Return the state of the CPU's random generator."""
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:  # noqa: ARG001
    """Set the state of the CPU's random generator."""
    torch.set_rng_state(new_state)


@contextlib.contextmanager
def _empty_context(*_: Any, **__: Any) -> Iterator[None]:
    """Do nothing, in place of selecting a stream or a device."""
    yield


_PROPERTIES = SimpleNamespace(
    name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=os.cpu_count() or 1
)

_STREAM = CpuStream()

_MEMORY_FUNCTIONS = (
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
)
_TENSOR_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor")
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "is_available": _make_constant(True),
    "is_initialized": _make_constant(True),
    "device_count": lambda _: _count_local_ranks,
    "current_device": _make_constant(DEVICE_INDEX),
    "get_device_name": _make_constant("cpu"),
    "get_device_capability": _make_constant((0, 0)),
    "get_device_properties": _make_constant(_PROPERTIES),
    "Stream": _replace_by(CpuStream),
    "Event": _replace_by(CpuEvent),
    "current_stream": _make_constant(_STREAM),
    "default_stream": _make_constant(_STREAM),
    "stream": _replace_by(_empty_context),
    "device": _replace_by(_empty_context),
    "get_rng_state": _replace_by(_get_rng_state),
    "set_rng_state": _replace_by(_set_rng_state),
    "random.get_rng_state": _replace_by(_get_rng_state),
    "random.set_rng_state": _replace_by(_set_rng_state),
    "manual_seed": _replace_by(torch.default_generator.manual_seed),
    "manual_seed_all": _replace_by(torch.default_generator.manual_seed),
    "default_generators": _replace_by((torch.default_generator,)),
    "_lazy_call": lambda _: lambda function, **kwargs: function(),
    "is_current_stream_capturing": _make_constant(False),
    "mem_get_info": _make_constant((0, 0)),
    **dict.fromkeys(_MEMORY_FUNCTIONS, _make_constant(0)),
    "memory_stats": _make_constant(Counter()),
    **{name: _replace_by(getattr(torch, name)) for name in _TENSOR_TYPES},
}
"""`Replacement.make` of each function, by the name in `torch.cuda`."""
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
"""Functions of `torch.cuda` that do nothing on CPU ranks."""

PATCH = cpu_patch(
    "fake_cuda",
    "Megatron asks torch.cuda for its device; on CPU ranks the process is the device",
    *(Replacement(f"torch.cuda:{name}", make) for name, make in _REPLACEMENTS.items()),
    *(Replacement(f"torch.cuda:{name}", _make_constant(None)) for name in _NO_OPERATIONS),
    # torch's own optimizers and collectives ask torch.accelerator, and must not find a GPU.
    Replacement("torch.accelerator:is_available", _make_constant(False)),
    Replacement("torch.accelerator:current_accelerator", _make_constant(None)),
)
