"""From the ranks' own files to those of the run folder; imports no torch, runs in the launcher."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tools.ledger.rank_file import RankLedger
from tools.records import run as records
from tools.records.io import write_record
from tools.records.measurements import CommunicationRecord, MemoryRecord, TimeRecord
from tools.records.routing import RoutingRecord


def collect(folder: Path) -> None:
    """Write `comm.json`, `memory.json`, `time.json`, `trace.json` of a run from its ranks' files.

    A mixture of experts gets a `routing.json` too.

    Ranks that left none are missing there too; a run without any gets no file.
    """
    files = sorted((folder / records.LEDGER_FOLDER).glob("rank*.json"))
    ranks = sorted((_read(file) for file in files), key=lambda rank: rank.rank)
    if not ranks:
        return
    communication = CommunicationRecord(tuple(rank.communication for rank in ranks))
    memory = MemoryRecord(tuple(rank.memory for rank in ranks if rank.memory is not None))
    write_record(folder / records.COMMUNICATION_FILE, communication)
    write_record(folder / records.MEMORY_FILE, memory)
    write_record(folder / records.TIME_FILE, TimeRecord(tuple(rank.time for rank in ranks)))
    routing = tuple(rank.routing for rank in ranks if rank.routing is not None)
    if routing:
        # Not indented as the others are: it has a number for each expert, layer and iteration.
        (folder / records.ROUTING_FILE).write_bytes(msgspec.json.encode(RoutingRecord(routing)))
    trace = {"traceEvents": list(_events(ranks)), "displayTimeUnit": "ms"}
    (folder / records.TRACE_FILE).write_bytes(msgspec.json.encode(trace))


def _read(file: Path) -> RankLedger:
    return msgspec.json.decode(file.read_bytes(), type=RankLedger)


def _events(ranks: Iterable[RankLedger]) -> Iterable[dict[str, Any]]:
    """Chrome's trace format: microseconds on one axis, a process a rank, a thread a category."""
    ranks = list(ranks)
    origin = min((span.start_ns for rank in ranks for span in rank.spans), default=0)
    for rank in ranks:
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
