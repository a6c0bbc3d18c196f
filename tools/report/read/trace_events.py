"""The events of a Chrome trace (`traceEvents`), PyTorch's profiler's or the ledger's own."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec


class EventArguments(msgspec.Struct, frozen=True, gc=False):
    """What is read of an event's `args`."""

    correlation: int = -1
    """Of a kernel and the call that launched it."""


class TraceEvent(msgspec.Struct, frozen=True, gc=False):
    """One event; times in µs."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = -1.0
    args: EventArguments = EventArguments()

    @property
    def end(self) -> float:
        """In µs."""
        return self.ts + self.dur


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[TraceEvent]  # noqa: N815 - Chrome's name


def read_trace_events(path: Path) -> list[TraceEvent]:
    """The whole events of a trace, packed or not.

    Raises:
        OSError: It cannot be read or unpacked.
        msgspec.DecodeError: It is no trace.
    """
    raw = path.read_bytes()
    trace = msgspec.json.decode(gzip.decompress(raw) if path.suffix == ".gz" else raw, type=_Trace)
    return [event for event in trace.traceEvents if event.ph == "X" and event.dur >= 0]
