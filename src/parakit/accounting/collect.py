"""Join the records that ranks write to the files of the run folder.

Each rank writes a `RankRecord`. After the run the launcher calls `collect_rank_records`. This module does not
import torch, which the launcher does not need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from parakit.accounting.timeline import Span
from parakit.artifacts import run as records
from parakit.artifacts.io import write_atomically, write_record
from parakit.artifacts.measurements import (
    CommunicationRecord,
    MemoryRecord,
    RankCommunication,
    RankMemory,
    RankRouting,
    RankTime,
    RoutingRecord,
    TimeRecord,
)


class RankRecord(msgspec.Struct, frozen=True):
    """The measurements of one rank: `rank<N>.json` in the ledger folder, written by its recorder."""

    rank: int
    communication: RankCommunication
    time: RankTime
    memory: RankMemory | None
    spans: tuple[Span, ...]
    routing: RankRouting | None = None
    """None for a dense model."""


def collect_rank_records(folder: Path) -> None:
    """Write a run's `comm.json`, `memory.json`, `time.json` and `trace.json` from the records of its ranks.

    For a model with experts, `routing.json` is written too. A rank without a record is missing from the files.
    If no rank has a record, nothing is written.

    Args:
        folder: The run folder.
    """
    files = (folder / records.LEDGER_FOLDER).glob("rank*.json")
    records_of_ranks = (msgspec.json.decode(file.read_bytes(), type=RankRecord) for file in files)
    ranks = sorted(records_of_ranks, key=lambda record: record.rank)
    if not ranks:
        return
    communication = CommunicationRecord(tuple(rank.communication for rank in ranks))
    memory = MemoryRecord(tuple(rank.memory for rank in ranks if rank.memory is not None))
    write_record(folder / records.COMMUNICATION_FILE, communication)
    write_record(folder / records.MEMORY_FILE, memory)
    write_record(folder / records.TIME_FILE, TimeRecord(tuple(rank.time for rank in ranks)))
    routing = tuple(rank.routing for rank in ranks if rank.routing is not None)
    if routing:
        # There is a number per expert, layer and iteration, so indentation would make the file much larger.
        content = msgspec.json.encode(RoutingRecord(routing))
        write_atomically(folder / records.ROUTING_FILE, content)
    trace = {"traceEvents": list(_trace_events(ranks)), "displayTimeUnit": "ms"}
    write_atomically(folder / records.TRACE_FILE, msgspec.json.encode(trace))


def _trace_events(ranks: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    """Yield the spans of the ranks as events of Chrome's trace format.

    A rank is a process, and communication and phases are its threads. Times are microseconds since the first
    span of all ranks.
    """
    origin = min((span.start_ns for rank in ranks for span in rank.spans), default=0)
    for rank in ranks:
        # The rank's name, which the viewer shows.
        yield {
            "ph": "M",
            "pid": rank.rank,
            "name": "process_name",
            "args": {"name": f"rank {rank.rank}"},
        }
        for span in rank.spans:
            yield {
                "ph": "X",
                "pid": rank.rank,
                "tid": "communication" if span.category == "communication" else "phases",
                "name": span.name,
                "cat": span.category,
                "ts": (span.start_ns - origin) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
            }
