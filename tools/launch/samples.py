"""`samples.csv`: what each rank's device reports, once a second."""

from __future__ import annotations

import csv
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tools.launch.devices import processor_name
from tools.launch.ranks import Ranks
from tools.records import SAMPLE_COLUMNS

INTERVAL_SECONDS = 1.0


class Sampler:
    """Samples CPU ranks in a thread while the `with` block runs: share of a core, resident memory."""

    def __init__(self, ranks: Ranks, path: Path) -> None:
        self._ranks = ranks
        self._path = path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        start = time.monotonic()
        known: dict[int, psutil.Process] = {}
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, SAMPLE_COLUMNS)
            writer.writeheader()
            while not self._done.wait(INTERVAL_SECONDS):
                for rank, process in sorted(self._ranks.by_rank().items()):
                    # cpu_percent measures since its last call, so the process object must be kept.
                    row = _row(known.setdefault(rank, process))
                    if row:
                        writer.writerow(
                            {"seconds": f"{time.monotonic() - start:.1f}", "rank": rank, **row}
                        )
                file.flush()


def _row(process: psutil.Process) -> dict[str, object] | None:
    try:
        return {
            "device": processor_name(),
            "utilisation_percent": process.cpu_percent(),
            "memory_bytes": process.memory_info().rss,
        }
    except psutil.Error:
        return None
