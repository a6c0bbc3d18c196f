"""`samples.csv`: what each rank's device reports, once a second."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil

from tools.launch.beside import Beside
from tools.launch.devices import processor_name
from tools.launch.ranks import Ranks
from tools.records.run import SAMPLE_COLUMNS

INTERVAL_SECONDS = 1.0

Reading = Mapping[str, object]
"""Of one device: values by column of `samples.csv`; what the device does not tell is left out."""


class Source(Protocol):
    """Where readings come from."""

    def read(self) -> Iterable[tuple[int, Reading]]:
        """One reading for each rank whose device answers."""
        ...


class Sampler(Beside):
    """Writes a source's readings to a file, in a thread, while the `with` block runs."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        self._path = path
        super().__init__()

    def watch(self) -> None:
        """As `Beside.watch`."""
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

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[int, psutil.Process] = {}

    def read(self) -> Iterable[tuple[int, Reading]]:
        """As `Source.read`."""
        for rank, process in sorted(self._ranks.by_rank().items()):
            # cpu_percent measures since its last call, so the process object must be kept.
            reading = _reading(self._known.setdefault(rank, process))
            if reading:
                yield rank, reading


def _reading(process: psutil.Process) -> Reading | None:
    try:
        return {
            "device": processor_name(),
            "utilisation_percent": process.cpu_percent(),
            "memory_bytes": process.memory_info().rss,
        }
    except psutil.Error:
        return None
