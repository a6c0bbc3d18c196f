"""Readings of the GPUs that ranks train on, through NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pynvml

from tools.launch.devices import Gpu, memory_used_bytes
from tools.launch.samples import Reading

THROTTLE_REASONS = {
    0x2: "applications clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks setting",
    0x200: "board limit",
    0x400: "reliability voltage",
}
"""Bits of `nvmlClocksEventReasons`. Bit 0, an idle GPU, is no throttling and is left out."""


class GpuRanks:
    """One reading a rank; the r-th rank of a machine trains on its r-th visible GPU.

    `first` tells the machine's first rank, which torchrun decides when the nodes meet.
    """

    def __init__(self, gpus: Sequence[Gpu], first: Callable[[], int] = lambda: 0) -> None:
        self._gpus = tuple(gpus)
        self._first = first

    def read(self) -> Iterable[tuple[int, Reading]]:
        """As `Source.read`; a GPU that has fallen off the bus gives no reading."""
        for rank, gpu in enumerate(self._gpus, start=self._first()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
            except pynvml.NVMLError:
                continue
            yield rank, {"device": gpu.name, **_told(gpu, handle)}


def throttle_reasons(bits: int) -> str:
    """Names of the reasons in a bit mask, `none` if there are none."""
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~(0x1 | sum(THROTTLE_REASONS))
    return " + ".join((*names, *((f"{unknown:#x}",) if unknown else ()))) or "none"


def event_reasons(handle: Any) -> int:
    """The reasons' bits; raises NVMLError where the GPU does not tell."""
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError:  # Drivers before 535 know the older name alone.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _told(gpu: Gpu, handle: Any) -> dict[str, object]:
    questions: dict[str, Callable[[], object]] = {
        "utilisation_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_bytes": lambda: memory_used_bytes(gpu),
        "power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "throttle_reasons": lambda: throttle_reasons(event_reasons(handle)),
    }
    told: dict[str, object] = {}
    for column, ask in questions.items():
        try:
            told[column] = ask()
        except pynvml.NVMLError:
            continue  # Not every GPU and driver answers every question.
    return told
