"""How fast GPUs really clock while they work, and why not faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from tools.launch.beside import Beside
from tools.launch.devices import Gpu
from tools.launch.gpu_samples import event_reasons, throttle_reasons

INTERVAL_SECONDS = 0.2


@dataclass(frozen=True)
class Clock:
    """One GPU's; None is what NVML does not tell."""

    gpu: int
    highest_mhz: int | None
    """Of the streaming multiprocessors, while it was watched."""
    limit_mhz: int | None
    """What the GPU can."""
    throttling: str
    """Every reason that was seen, `none` if there was none."""


class ClockWatch(Beside):
    """Reads the clocks of some GPUs in a thread while the `with` block runs."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = tuple(gpus)
        self._highest: dict[int, int] = {}
        self._reasons: dict[int, int] = {}
        super().__init__()

    def clocks(self) -> list[Clock]:
        """What was seen, by GPU."""
        return [
            Clock(
                gpu=gpu.index,
                highest_mhz=self._highest.get(gpu.index),
                limit_mhz=_limit(gpu),
                throttling=throttle_reasons(self._reasons.get(gpu.index, 0)),
            )
            for gpu in self._gpus
        ]

    def watch(self) -> None:
        """As `Beside.watch`."""
        while True:
            for gpu in self._gpus:
                self._look(gpu.index)
            if self.done.wait(INTERVAL_SECONDS):
                return

    def _look(self, index: int) -> None:
        handle: Any = _told(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return
        clock = _told(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        if clock is not None:
            self._highest[index] = max(clock, self._highest.get(index, 0))
        self._reasons[index] = self._reasons.get(index, 0) | (
            _told(lambda: event_reasons(handle)) or 0
        )


def _limit(gpu: Gpu) -> int | None:
    handle: Any = _told(lambda: pynvml.nvmlDeviceGetHandleByIndex(gpu.index))
    if handle is None:
        return None
    return _told(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)))


def _told[T](ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except pynvml.NVMLError:
        return None  # Not every GPU and driver answers every question.
