"""`samples.csv`: what each device said of itself, once a second."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

MAX_POINTS = 400
"""A series keeps at most about so many points; a day at 1 Hz is drawn no better with more."""
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class DeviceSeries:
    """One rank's device over time; a reading that it does not give is None."""

    rank: int
    seconds: tuple[float, ...]
    utilisation_percent: tuple[float | None, ...]
    memory_bytes: tuple[float | None, ...]
    power_watts: tuple[float | None, ...]
    temperature_celsius: tuple[float | None, ...]
    sm_clock_mhz: tuple[float | None, ...]
    peak_memory_bytes: int | None
    throttled: tuple[str, ...] = ()
    """Reasons for a lowered clock that were seen."""


@dataclass(frozen=True)
class DeviceSamples:
    """All ranks' series."""

    series: tuple[DeviceSeries, ...] = ()

    @property
    def peak_memory_bytes(self) -> int | None:
        """Largest reading of any device."""
        peaks = [s.peak_memory_bytes for s in self.series if s.peak_memory_bytes]
        return max(peaks, default=None)


def read_samples(path: Path) -> DeviceSamples:
    """Read `samples.csv`; a missing, foreign or empty file has no series, cut lines are skipped."""
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return DeviceSamples()
    by_rank: dict[int, list[dict[str, str]]] = {}
    with path.open(newline="", errors="replace") as file:
        try:
            for row in csv.DictReader(line.replace("\0", "") for line in file):
                if (row.get("rank") or "").isdigit() and _number(row, "seconds") is not None:
                    by_rank.setdefault(int(row["rank"]), []).append(row)
        except csv.Error:
            pass  # A damaged line ends the file; what came before it counts.
    return DeviceSamples(tuple(_series(rank, by_rank[rank]) for rank in sorted(by_rank)))


def _series(rank: int, rows: list[dict[str, str]]) -> DeviceSeries:
    memory = [value for row in rows if (value := _number(row, "memory_bytes"))]
    reasons = {row.get("throttle_reasons") or "" for row in rows} - {"", "none", "0"}
    thinned = rows[:: max(1, len(rows) // MAX_POINTS)]

    def column(name: str) -> tuple[float | None, ...]:
        return tuple(_number(row, name) for row in thinned)

    return DeviceSeries(
        rank=rank,
        seconds=tuple(second or 0.0 for second in column("seconds")),
        utilisation_percent=column("utilisation_percent"),
        memory_bytes=column("memory_bytes"),
        power_watts=column("power_watts"),
        temperature_celsius=column("temperature_celsius"),
        sm_clock_mhz=column("sm_clock_mhz"),
        peak_memory_bytes=int(max(memory)) if memory else None,
        throttled=tuple(sorted(reasons)),
    )


def _number(row: dict[str, str], name: str) -> float | None:
    try:
        return float(row.get(name) or "")
    except ValueError:
        return None
