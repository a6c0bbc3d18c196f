"""`samples.csv`: what each rank's device reports, once a second: CPU ranks by psutil, GPUs by NVML."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil
import pynvml

from tools.launch.background import BackgroundThread
from tools.launch.devices import Gpu, memory_used_bytes, processor_name
from tools.launch.supervise.ranks import RankProcesses
from tools.records.run import SAMPLE_COLUMNS

INTERVAL_SECONDS = 1.0

Reading = Mapping[str, object]
"""Of one device: values by column of `samples.csv`; what the device does not report is left out."""


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


class SampleSource(Protocol):
    """Where readings come from."""

    def read(self) -> Iterable[tuple[int, Reading]]:
        """One reading for each rank whose device answers."""
        ...


class Sampler(BackgroundThread):
    """Writes a source's readings to a file, in a thread, while the `with` block runs."""

    def __init__(self, source: SampleSource, path: Path) -> None:
        self._source = source
        self._path = path
        super().__init__()

    def watch(self) -> None:
        """As `BackgroundThread.watch`."""
        # A full disk ends the samples, not the run.
        with suppress(OSError):
            self._write_samples()

    def _write_samples(self) -> None:
        start = time.monotonic()
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, SAMPLE_COLUMNS)
            writer.writeheader()
            while not self.done.wait(INTERVAL_SECONDS):
                for rank, reading in self._source.read():
                    seconds = f"{time.monotonic() - start:.1f}"
                    writer.writerow({"seconds": seconds, "rank": rank, **reading})
                file.flush()


class CpuRanks:
    """CPU ranks: each process's share of a core and resident memory, through psutil."""

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self._known: dict[int, psutil.Process] = {}

    def read(self) -> Iterable[tuple[int, Reading]]:
        """As `SampleSource.read`."""
        for rank, process in sorted(self._ranks.by_rank().items()):
            # cpu_percent measures since its last call, so the process object must be kept.
            reading = _reading(self._known.setdefault(rank, process))
            if reading:
                yield rank, reading


class GpuRanks:
    """One reading a rank; the r-th rank of a machine trains on its r-th visible GPU.

    `first` gives the machine's first rank, which torchrun decides.
    """

    def __init__(self, gpus: Sequence[Gpu], first: Callable[[], int] = lambda: 0) -> None:
        self._gpus = tuple(gpus)
        self._first = first

    def read(self) -> Iterable[tuple[int, Reading]]:
        """As `SampleSource.read`; a GPU that has fallen off the bus gives no reading."""
        for rank, gpu in enumerate(self._gpus, start=self._first()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
            except pynvml.NVMLError:
                continue
            yield rank, {"device": gpu.name, **_reported(gpu, handle)}


def throttle_reasons(bits: int) -> str:
    """Names of the reasons in a bit mask, `none` if there are none."""
    names = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~(0x1 | sum(THROTTLE_REASONS))
    return " + ".join((*names, *((f"{unknown:#x}",) if unknown else ()))) or "none"


def event_reasons(handle: Any) -> int:
    """The reasons' bits; raises NVMLError where the GPU does not report them."""
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError:  # Drivers before 535 know the older name alone.
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _reading(process: psutil.Process) -> Reading | None:
    try:
        return {
            "device": processor_name(),
            "utilisation_percent": process.cpu_percent(),
            "memory_bytes": process.memory_info().rss,
        }
    except psutil.Error:
        return None


def _reported(gpu: Gpu, handle: Any) -> dict[str, object]:
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
    found: dict[str, object] = {}
    for column, ask in questions.items():
        try:
            found[column] = ask()
        except pynvml.NVMLError:
            continue  # Not every GPU and driver answers every question.
    return found
