"""`trace.json` as data: who did what when in one iteration, with micro batches numbered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.plan.schedules.simulate import Pass, Step, simulate
from tools.records.run import TRACE_FILE
from tools.report.read.traces import read_trace_events
from tools.spec.strategy import Parallelism

_LANE_OF_CALLS = "communication"
_PASSES = {"forward-compute": Pass.FORWARD, "backward-compute": Pass.BACKWARD}


@dataclass(frozen=True)
class TraceSpan:
    """A span of one rank's time."""

    rank: int
    name: str
    category: str
    """A phase's name, or `communication`."""
    start_ms: float
    end_ms: float
    step: Step | None = None
    """Which micro batch, through which virtual stage; of forward and backward passes only."""

    @property
    def is_call(self) -> bool:
        """Whether it is a communication call, from being issued to having its result."""
        return self.category == _LANE_OF_CALLS

    @property
    def group(self) -> str:
        """The process group of a call."""
        return self.name.rpartition(" ")[2] if self.is_call else ""

    @property
    def milliseconds(self) -> float:
        """How long it lasted."""
        return self.end_ms - self.start_ms


def read_trace(folder: Path, split: Parallelism, microbatches: int) -> tuple[TraceSpan, ...]:
    """The pieces of a run folder's trace, by rank and start; empty if nothing was traced.

    Raises:
        FileNotFoundError: The run left no trace.
        msgspec.DecodeError: The file is not a trace of this kit.
    """
    events = read_trace_events(folder / TRACE_FILE)
    pieces = [TraceSpan(int(e.pid), e.name, e.cat, e.ts / 1000, e.end / 1000) for e in events]
    ranks = sorted({piece.rank for piece in pieces})
    found: list[TraceSpan] = []
    for rank in ranks:
        own = sorted((p for p in pieces if p.rank == rank), key=lambda p: (p.start_ms, -p.end_ms))
        found += _numbered(own, rank, split, microbatches)
    return tuple(found)


def passes(pieces: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Forward and backward passes, outermost spans only."""
    return [piece for piece in pieces if piece.name in _PASSES]


def idle_over_work(pieces: Sequence[TraceSpan]) -> dict[int, float]:
    """Idle over working time of each rank, from the first forward to the last backward."""
    found = passes(pieces)
    if not found:
        return {}
    length = max(p.end_ms for p in found) - min(p.start_ms for p in found)
    busy: dict[int, float] = {}
    for piece in found:
        busy[piece.rank] = busy.get(piece.rank, 0.0) + piece.milliseconds
    return {rank: length / worked - 1 for rank, worked in sorted(busy.items()) if worked}


def _numbered(
    pieces: Sequence[TraceSpan], rank: int, split: Parallelism, microbatches: int
) -> list[TraceSpan]:
    """Number the passes as the schedule orders them on this rank's stage."""
    steps = {
        direction: _steps(direction, rank, split, microbatches) for direction in _PASSES.values()
    }
    numbered = []
    for piece in pieces:
        order = steps[_PASSES[piece.name]] if piece.name in _PASSES else []
        numbered.append(replace(piece, step=order.pop(0)) if order else piece)
    return numbered


def _steps(direction: Pass, rank: int, split: Parallelism, microbatches: int) -> list[Step]:
    if split.pipeline == 1:
        return [Step(direction, number) for number in range(microbatches)]
    worker = split.pipeline_rank(rank)
    timeline = simulate(
        split.run_schedule, split.pipeline, microbatches, virtual=split.virtual_stages
    )
    events = sorted(timeline.events, key=lambda event: event.start)
    return [e.step for e in events if e.worker == worker and e.step.direction is direction]
