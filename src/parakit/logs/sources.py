"""What a run folder holds beside its log: device samples, ledgers, TensorBoard's curves.

Whatever is missing or damaged is empty or a note, never an error.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.measurements import (
    CommunicationRecord,
    MemoryRecord,
    RoutingRecord,
    TimeRecord,
    read_measurements,
)
from parakit.artifacts.run import COMMUNICATION_FILE, MEMORY_FILE, ROUTING_FILE, TIME_FILE
from parakit.logs.iterations import Iteration, IterationTable
from parakit.logs.scraped import ScrapedLog

MAX_POINTS = 400
"""A series keeps at most about so many points; a day at 1 Hz is drawn no better with more."""
_MAX_BYTES = 64 << 20


_READINGS = (
    *("utilisation_percent", "memory_bytes", "power_watts"),
    *("temperature_celsius", "sm_clock_mhz"),
)


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
                rank = row.get("rank") or ""
                if rank.isdecimal() and _column([row], "seconds") != (None,):
                    by_rank.setdefault(int(rank), []).append(row)
        except csv.Error:
            pass  # A damaged line ends the file; what came before it counts.
    return DeviceSamples(tuple(_series(rank, by_rank[rank]) for rank in sorted(by_rank)))


def _series(rank: int, rows: Sequence[Mapping[str, str]]) -> DeviceSeries:
    memory = list(filter(None, _column(rows, "memory_bytes")))
    reasons = {row.get("throttle_reasons") or "" for row in rows} - {"", "none", "0"}
    thinned = rows[:: max(1, len(rows) // MAX_POINTS)]
    return DeviceSeries(
        rank=rank,
        seconds=tuple(second or 0.0 for second in _column(thinned, "seconds")),
        peak_memory_bytes=int(max(memory)) if memory else None,
        throttled=tuple(sorted(reasons)),
        **{name: _column(thinned, name) for name in _READINGS},
    )


def _column(rows: Sequence[Mapping[str, str]], name: str) -> tuple[float | None, ...]:
    """A reading of each row; None where it is no number."""
    found: list[float | None] = []
    for row in rows:
        try:
            found.append(float(row.get(name) or ""))
        except ValueError:
            found.append(None)
    return tuple(found)


@dataclass(frozen=True)
class RankMeasurements:
    """What the ledgers measured; None where there is none, or it counted no rank's iteration."""

    memory: MemoryRecord | None = None
    communication: CommunicationRecord | None = None
    routing: RoutingRecord | None = None

    @property
    def peak_memory_bytes_by_rank(self) -> Mapping[int, int]:
        """Peak of each rank whose memory was counted."""
        return {r.rank: r.peak_bytes for r in self.memory.ranks} if self.memory else {}

    @property
    def memory_categories_by_rank(self) -> Mapping[int, Mapping[str, int]]:
        """What each rank's peak was for; sums to it."""
        ranks = self.memory.ranks if self.memory else ()
        return {
            rank.rank: {category.value: size for category, size in rank.categories.items()}
            for rank in ranks
        }

    @property
    def sent_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes a rank puts on the wire in a steady iteration."""
        record = self.communication
        return {rank.rank: rank.wire_bytes for rank in record.ranks} if record else {}


def read_all_measurements(folder: Path) -> tuple[RankMeasurements, list[str]]:
    """Read the ledgers of a run folder, and say what is wrong with them."""
    memory, why_no_memory = _read(folder, MemoryRecord, MEMORY_FILE)
    communication, why_no_calls = _read(folder, CommunicationRecord, COMMUNICATION_FILE)
    routing, why_no_routing = _read(folder, RoutingRecord, ROUTING_FILE)
    if communication:
        # A rank that crashed before a steady iteration counted nothing, which is not zero bytes.
        counted = tuple(rank for rank in communication.ranks if rank.steady_iterations)
        communication = replace(communication, ranks=counted)
    kept = RankMeasurements(
        memory if memory and memory.ranks else None,
        communication if communication and communication.ranks else None,
        routing if routing and routing.ranks else None,
    )
    return kept, list(filter(None, (why_no_memory, why_no_calls, why_no_routing)))


def _read[T](folder: Path, kind: type[T], name: str) -> tuple[T | None, str]:
    """A ledger, or what is wrong with it; empty where there is none."""
    try:
        return read_measurements(folder, kind), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"{name} cannot be used ({error})"


def read_time_ledger(folder: Path) -> tuple[TimeRecord | None, str]:
    """The time ledger of a run folder, ranks with a steady iteration only; or why there is none."""
    record, problem = _read(folder, TimeRecord, TIME_FILE)
    if record is None:
        return None, problem or f"no {TIME_FILE}"
    timed = tuple(rank for rank in record.ranks if rank.iteration_seconds > 0)
    if not timed:
        return None, f"{TIME_FILE} holds no steady iteration"
    return replace(record, ranks=timed), ""


_TAGS = {
    "lm loss": "lm_loss",
    "iteration-time": "elapsed_ms",
    "grad-norm": "grad_norm",
    "throughput": "throughput_tflops_per_gpu",
    "learning-rate": "learning_rate",
    "batch-size": "global_batch_size",
    "loss-scale": "loss_scale",
}


_MAX_SAMPLES = 2**53
"""Of an iteration: from here on a float holds no counts."""


def log_from_tensorboard(folder: Path, log: ScrapedLog) -> ScrapedLog:
    """The log, with iterations from event files where there are any."""
    if not any(folder.rglob("events.out.tfevents.*")):
        return log
    scalars, found = read_scalars(folder), defaultdict[int, dict[str, Any]](dict)
    for tag, field in _TAGS.items():
        for step, value in scalars.get(tag, {}).items():
            if field == "global_batch_size" and not 0 < value < _MAX_SAMPLES:
                continue
            found[step][field] = 1000 * value if field == "elapsed_ms" else value
    if not found:
        return log
    first = min(found)
    iterations = [
        Iteration(step, first_of_start=step == first, **values)
        for step, values in sorted(found.items())
    ]
    note = "iterations come from TensorBoard's event files; the log has none"
    return replace(log, iterations=IterationTable.of(iterations), notes=(*log.notes, note))


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Scalars by tag and step; of repeated steps the later counts."""
    # Imported here: it takes a second, and most reports need none of it.
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        EventFileLoader,
    )

    scalars: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else None
                if value.HasField("tensor") and len(value.tensor.float_val) == 1:
                    number = value.tensor.float_val[0]
                if number is not None:
                    scalars.setdefault(value.tag, {})[event.step] = float(number)
    return scalars
