"""What a schedule costs: idle time, activations and weight versions held, staleness."""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.schedules import Event, Pass, Schedule, Timeline


@dataclass(frozen=True)
class ScheduleFigures:
    """Measured on a simulated timeline."""

    bubble: float
    """Idle time over working time, of a worker, (p−1)/m in closed form for GPipe and 1F1B."""
    idle_share: float
    """Idle time over all time."""
    activations: tuple[float, ...]
    """Most activations a worker holds, in whole stages' worth of micro batches."""
    weight_versions: tuple[int, ...]
    """Versions of its weights a worker must keep."""
    staleness: tuple[int, ...]
    """Updates of a worker's weights between a micro batch's forward and its backward, at most."""


def figures(timeline: Timeline) -> ScheduleFigures:
    """Measure a timeline."""
    workers = range(timeline.pipeline)
    by_worker = [[e for e in timeline.events if e.worker == worker] for worker in workers]
    working = sum(event.end - event.start for event in timeline.events) / timeline.pipeline
    idle = timeline.length - working
    stale = [_staleness(events, timeline.schedule) for events in by_worker]
    return ScheduleFigures(
        bubble=idle / working,
        idle_share=idle / timeline.length,
        activations=tuple(_most_held(events) / timeline.virtual for events in by_worker),
        weight_versions=tuple(most + 1 for most in stale),
        staleness=tuple(stale),
    )


def closed_form_bubble(timeline: Timeline) -> float:
    """Idle over working time if messages take none: (p−1)/m, /v interleaved, once for PipeDream.

    PipeDream fills and drains once over all iterations; the others once in each.
    """
    microbatches = timeline.microbatches
    if timeline.schedule is Schedule.PIPEDREAM:
        microbatches *= timeline.iterations
    return (timeline.pipeline - 1) / (microbatches * timeline.virtual)


def closed_form_activations(timeline: Timeline) -> tuple[float, ...]:
    """Stages' worth of micro batches in flight, by worker."""
    pipeline, microbatches, virtual = timeline.pipeline, timeline.microbatches, timeline.virtual
    if timeline.schedule is Schedule.GPIPE:
        return (float(microbatches),) * pipeline
    if timeline.schedule is Schedule.PIPEDREAM:
        microbatches *= timeline.iterations
    if virtual == 1:
        return tuple(float(min(pipeline - worker, microbatches)) for worker in range(pipeline))
    chunks = (
        2 * (pipeline - worker - 1) + (virtual - 1) * pipeline + 1 for worker in range(pipeline)
    )
    return tuple(min(count, microbatches * virtual) / virtual for count in chunks)


def _most_held(events: list[Event]) -> int:
    """Forward passes whose backward has not ended, at most."""
    held = most = 0
    for event in sorted(events, key=lambda e: e.start):
        held += 1 if event.step.direction is Pass.FORWARD else 0
        most = max(most, held)
        held -= 1 if event.step.direction is Pass.BACKWARD else 0
    return most


def _staleness(events: list[Event], schedule: Schedule) -> int:
    """PipeDream updates after every backward; the others only between iterations."""
    if schedule is not Schedule.PIPEDREAM:
        return 0
    backwards = [e for e in events if e.step.direction is Pass.BACKWARD]
    starts = {e.step.microbatch: e.start for e in events if e.step.direction is Pass.FORWARD}
    return max(
        sum(starts[own.step.microbatch] < other.end <= own.start for other in backwards)
        for own in backwards
    )
