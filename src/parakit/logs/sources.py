"""Read the files of a run folder besides its log: device samples, measurements of ranks, TensorBoard events.

A missing or damaged file gives an empty result or a note, never an error.
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
"""About the most points that a series keeps. A chart of a day at 1 Hz is no better with more."""
_MAX_BYTES = 64 << 20


_SAMPLED_VALUES = (
    *("utilisation_percent", "memory_bytes", "power_watts"),
    *("temperature_celsius", "sm_clock_mhz"),
)


@dataclass(frozen=True)
class DeviceSeries:
    """Samples of one rank's device over time. A value that the device does not report is None."""

    rank: int
    seconds: tuple[float, ...]
    utilisation_percent: tuple[float | None, ...]
    memory_bytes: tuple[float | None, ...]
    power_watts: tuple[float | None, ...]
    temperature_celsius: tuple[float | None, ...]
    sm_clock_mhz: tuple[float | None, ...]
    peak_memory_bytes: int | None
    throttled: tuple[str, ...] = ()
    """Reasons for which the device lowered its clock at some time."""


@dataclass(frozen=True)
class DeviceSamples:
    """Samples of the devices of all ranks."""

    series: tuple[DeviceSeries, ...] = ()

    @property
    def peak_memory_bytes(self) -> int | None:
        """Largest memory of any device; None without samples."""
        peaks = [series.peak_memory_bytes for series in self.series if series.peak_memory_bytes]
        return max(peaks, default=None)


def read_samples(path: Path) -> DeviceSamples:
    """Read `samples.csv`. A missing, foreign, empty or very large file gives a result without series.

    Lines without a rank or a time are skipped.
    """
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return DeviceSamples()
    rows_by_rank: dict[int, list[dict[str, str]]] = {}
    with path.open(newline="", errors="replace") as file:
        lines_without_nul = (line.replace("\0", "") for line in file)
        try:
            for row in csv.DictReader(lines_without_nul):
                rank = row.get("rank") or ""
                (seconds,) = _parse_column([row], "seconds")
                if rank.isdecimal() and seconds is not None:
                    rows_by_rank.setdefault(int(rank), []).append(row)
        except csv.Error:
            pass  # A damaged line ends the reading; the lines before it count.
    return DeviceSamples(
        tuple(_make_series(rank, rows) for rank, rows in sorted(rows_by_rank.items()))
    )


def _make_series(rank: int, rows: Sequence[Mapping[str, str]]) -> DeviceSeries:
    """Return the samples of one rank from its rows of `samples.csv`, thinned out to about MAX_POINTS."""
    memory = list(filter(None, _parse_column(rows, "memory_bytes")))
    reasons = {row.get("throttle_reasons") or "" for row in rows} - {"", "none", "0"}
    thinned = rows[:: max(1, len(rows) // MAX_POINTS)]
    return DeviceSeries(
        rank=rank,
        seconds=tuple(second or 0.0 for second in _parse_column(thinned, "seconds")),
        peak_memory_bytes=int(max(memory)) if memory else None,
        throttled=tuple(sorted(reasons)),
        **{name: _parse_column(thinned, name) for name in _SAMPLED_VALUES},
    )


def _parse_column(rows: Sequence[Mapping[str, str]], name: str) -> tuple[float | None, ...]:
    """Return a column of the rows as numbers; None for values that are no number."""
    values: list[float | None] = []
    for row in rows:
        try:
            values.append(float(row.get(name) or ""))
        except ValueError:
            values.append(None)
    return tuple(values)


@dataclass(frozen=True)
class RankMeasurements:
    """Memory, communication and routing that the ranks of a run measured.

    A field is None if its file is missing, or if the file has no rank with a measured iteration.
    """

    memory: MemoryRecord | None = None
    communication: CommunicationRecord | None = None
    routing: RoutingRecord | None = None

    @property
    def peak_memory_bytes_by_rank(self) -> Mapping[int, int]:
        """Peak memory of each measured rank."""
        ranks = self.memory.ranks if self.memory else ()
        return {rank.rank: rank.peak_bytes for rank in ranks}

    @property
    def memory_categories_by_rank(self) -> Mapping[int, Mapping[str, int]]:
        """Bytes by purpose at each rank's peak, which add up to the peak."""
        ranks = self.memory.ranks if self.memory else ()
        return {
            rank.rank: {category.value: size for category, size in rank.categories.items()}
            for rank in ranks
        }

    @property
    def sent_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes that each rank sends per steady iteration."""
        record = self.communication
        return {rank.rank: rank.wire_bytes for rank in record.ranks} if record else {}


def read_all_measurements(folder: Path) -> tuple[RankMeasurements, list[str]]:
    """Return the memory, communication and routing records of a run folder, and a sentence per unusable file.

    A record is None if its file is missing or unusable, or if it has no ranks. Ranks without a steady iteration
    are removed from the communication record.
    """
    memory, memory_problem = _read_record(folder, MemoryRecord, MEMORY_FILE)
    communication, communication_problem = _read_record(
        folder, CommunicationRecord, COMMUNICATION_FILE
    )
    routing, routing_problem = _read_record(folder, RoutingRecord, ROUTING_FILE)
    if communication:
        # A rank that crashed before a steady iteration has no count, which must not look like zero bytes.
        counted = tuple(rank for rank in communication.ranks if rank.steady_iterations)
        communication = replace(communication, ranks=counted)
    measurements = RankMeasurements(
        memory if memory and memory.ranks else None,
        communication if communication and communication.ranks else None,
        routing if routing and routing.ranks else None,
    )
    problems = (memory_problem, communication_problem, routing_problem)
    return measurements, [problem for problem in problems if problem]


def _read_record[T](folder: Path, kind: type[T], name: str) -> tuple[T | None, str]:
    """Return the measurements of one kind, and an empty text; if the file is unusable, return None and the reason.

    If the file does not exist, None and an empty text are returned.
    """
    try:
        return read_measurements(folder, kind), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"{name} cannot be used ({error})"


def read_time_ledger(folder: Path) -> tuple[TimeRecord | None, str]:
    """Return the measured times of the ranks with a steady iteration, or None and the reason."""
    record, problem = _read_record(folder, TimeRecord, TIME_FILE)
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
"""Samples of an iteration from which on a float cannot hold every count."""


def log_from_tensorboard(folder: Path, log: ScrapedLog) -> ScrapedLog:
    """Return the log with the iterations of TensorBoard's event files; unchanged if there are no such files."""
    if not any(folder.rglob("events.out.tfevents.*")):
        return log
    scalars = read_scalars(folder)
    values_by_step = defaultdict[int, dict[str, Any]](dict)
    for tag, field in _TAGS.items():
        for step, value in scalars.get(tag, {}).items():
            if field == "global_batch_size" and not 0 < value < _MAX_SAMPLES:
                continue
            # TensorBoard's times are in seconds.
            values_by_step[step][field] = 1000 * value if field == "elapsed_ms" else value
    if not values_by_step:
        return log
    first = min(values_by_step)
    iterations = [
        Iteration(step, first_of_start=step == first, **values)
        for step, values in sorted(values_by_step.items())
    ]
    note = "iterations come from TensorBoard's event files; the log has none"
    return replace(log, iterations=IterationTable.of(iterations), notes=(*log.notes, note))


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return the scalars in all event files of a folder, by tag and step.

    If a step is repeated, the last value is returned.
    """
    # The import takes a second, and most reports do not need it.
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
