"""Pipeline schedules, simulated pass by pass: GPipe, 1F1B, interleaved 1F1B, and PipeDream's.

Every worker runs its passes in a fixed order, each as soon as its input has arrived. Sources: GPipe
arXiv:1811.06965; PipeDream arXiv:1806.03377 (asynchronous 1F1B with weight stashing), with two
versions arXiv:2006.09503; 1F1B with flushes and interleaving arXiv:2104.04473 §2.2 and Megatron's
`pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from parakit.config.model import round_up
from parakit.config.strategy import PipelineSchedule

MAX_STEPS = 100_000
"""Maximum of forward and backward passes in one simulation; all schedules then take some ten
seconds.
"""
COMPARED_SCHEDULES = (
    PipelineSchedule.GPIPE,
    PipelineSchedule.ONE_F_ONE_B,
    PipelineSchedule.INTERLEAVED,
    PipelineSchedule.PIPEDREAM,
    PipelineSchedule.PIPEDREAM_2BW,
)
"""Schedules that are compared. PipeDream-Flush is left out because it is 1F1B."""


class Pass(StrEnum):
    """Direction of a pass through a stage."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One pass of one micro batch through one chunk of one worker."""

    direction: Pass
    microbatch: int
    """Index of the micro batch over all iterations."""
    chunk: int = 0
    """Index of the worker's virtual stage."""


@dataclass(frozen=True, slots=True)
class Event:
    """A step with its start and end."""

    worker: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedSchedule:
    """The timeline of a simulated schedule."""

    schedule: PipelineSchedule
    pipeline: int
    microbatches: int
    """Micro batches per iteration."""
    iterations: int
    virtual: int
    events: tuple[Event, ...]

    @property
    def length(self) -> float:
        """Time from the first start to the last end."""
        return max(event.end for event in self.events)


def simulate_schedule(
    schedule: PipelineSchedule,
    pipeline: int,
    microbatches: int,
    *,
    iterations: int = 1,
    virtual: int = 2,
    forward: float = 1.0,
    backward: float = 2.0,
    transfer: float = 0.0,
) -> SimulatedSchedule:
    """Simulate a schedule in which a pass through a full stage takes `forward` or `backward`, and a
    message takes `transfer`.

    GPipe and both 1F1B flush: the next iteration starts when all stages have finished the present
    one. PipeDream updates after every backward, PipeDream-2BW once per iteration; neither ever
    flushes.

    Raises:
        ValueError: A degree is below 1, there are too many steps, PP does not divide the micro batches of
            an interleaved schedule, or PipeDream-2BW has fewer micro batches than stages.
    """
    if min(pipeline, microbatches, iterations, virtual) < 1:
        raise ValueError("Stages, micro batches, iterations and virtual stages start at 1.")
    steps = 2 * pipeline * microbatches * iterations * virtual
    if steps > MAX_STEPS:
        raise ValueError(
            f"{pipeline:,} stages, {microbatches:,} micro batches, {virtual:,} virtual stages and "
            f"{iterations:,} iterations are {steps:,} steps; use at most {MAX_STEPS:,} "
            "(2 x stages x micro batches x virtual stages x iterations)."
        )
    if schedule is not PipelineSchedule.INTERLEAVED:
        virtual = 1
    elif microbatches % pipeline:
        raise ValueError(
            f"Interleaving needs micro batches in multiples of the {pipeline} stages, not "
            f"{microbatches}; use {round_up(microbatches, pipeline)}."
        )
    if schedule is PipelineSchedule.PIPEDREAM_2BW and microbatches < pipeline:
        raise ValueError(
            f"PipeDream-2BW needs as many micro batches as its {pipeline} stages (arXiv:2006.09503 "
            f"section 3.1), not {microbatches}; use {pipeline}."
        )
    rounds = [(0, microbatches * iterations)]
    if not schedule.is_asynchronous:
        rounds = [(i * microbatches, microbatches) for i in range(iterations)]
    seconds = {Pass.FORWARD: forward / virtual, Pass.BACKWARD: backward / virtual}
    events: list[Event] = []
    start = 0.0
    for first, count in rounds:
        orders = [_order(schedule, worker, pipeline, count, virtual) for worker in range(pipeline)]
        events += _run(orders, first, start, virtual, seconds, transfer)
        start = max(event.end for event in events)
    return SimulatedSchedule(schedule, pipeline, microbatches, iterations, virtual, tuple(events))


def _order(
    schedule: PipelineSchedule, worker: int, pipeline: int, count: int, virtual: int
) -> list[Step]:
    """Return the steps of one worker in order, for `count` micro batches."""
    forwards = [_virtual_step(Pass.FORWARD, k, pipeline, virtual) for k in range(count * virtual)]
    backwards = [_virtual_step(Pass.BACKWARD, k, pipeline, virtual) for k in range(count * virtual)]
    if schedule is PipelineSchedule.GPIPE:
        return forwards + backwards[::-1]
    warmup = min(_warmup(worker, pipeline, virtual), len(forwards))
    steps = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        steps += [forward, backward]
    return steps + backwards[len(forwards) - warmup :]


def _warmup(worker: int, pipeline: int, virtual: int) -> int:
    """Return the number of forwards of 1F1B before the first backward."""
    stages = pipeline - worker - 1
    return 2 * stages + (virtual - 1) * pipeline if virtual > 1 else stages


def _virtual_step(direction: Pass, index: int, pipeline: int, virtual: int) -> Step:
    """Return the `index`-th step in Megatron's order: groups of PP micro batches pass each chunk in
    turn.
    """
    group, position = divmod(index, pipeline * virtual)
    chunk = position // pipeline
    if direction is Pass.BACKWARD:
        chunk = virtual - 1 - chunk
    return Step(direction, group * pipeline + position % pipeline, chunk)


def _run(
    orders: list[list[Step]],
    first: int,
    start: float,
    virtual: int,
    seconds: Mapping[Pass, float],
    transfer: float,
) -> list[Event]:
    """Return the events of all workers: each step starts when its worker is free and its input has
    arrived.
    """
    pipeline = len(orders)
    done: dict[tuple[int, Step], float] = {}
    free, position = [start] * pipeline, [0] * pipeline
    events: list[Event] = []
    waiting = sum(map(len, orders))
    while waiting:
        before = waiting
        for worker, order in enumerate(orders):
            while position[worker] < len(order):
                step = order[position[worker]]
                source, ready = _source(step, worker, pipeline, virtual), 0.0
                if source is not None:
                    if source not in done:
                        break
                    ready = done[source] + transfer * (source[0] != worker)
                begin = max(free[worker], ready)
                end = begin + seconds[step.direction]
                done[worker, step] = free[worker] = end
                shown = Step(step.direction, step.microbatch + first, step.chunk)
                events.append(Event(worker, shown, begin, end))
                position[worker] += 1
                waiting -= 1
        if waiting == before:
            raise RuntimeError("The schedule deadlocks.")
    return events


def _source(step: Step, worker: int, pipeline: int, virtual: int) -> tuple[int, Step] | None:
    """Return the worker and step whose output this step needs; None for the first forward."""
    forward, stage = step.direction is Pass.FORWARD, step.chunk * pipeline + worker
    if forward and stage == 0:
        return None
    if not forward and stage == pipeline * virtual - 1:
        return worker, Step(Pass.FORWARD, step.microbatch, step.chunk)
    chunk, neighbour = divmod(stage - 1 if forward else stage + 1, pipeline)
    return neighbour, Step(step.direction, step.microbatch, chunk)


@dataclass(frozen=True)
class ScheduleFigures:
    """Measurements of a simulated timeline."""

    bubble: float
    """Idle time divided by working time of a worker; for GPipe and 1F1B the closed form is (p−1)/m.
    """
    idle_fraction: float
    """Idle time divided by total time."""
    activations: tuple[float, ...]
    """Peak of stored activations per worker, in micro batches of a full stage."""
    weight_versions: tuple[int, ...]
    """Number of weight versions that each worker stores."""
    staleness: tuple[int, ...]
    """Maximum number of updates of a worker's weights between a micro batch's forward and its
    backward.
    """


def measure_schedule(timeline: SimulatedSchedule) -> ScheduleFigures:
    """Return the measurements of a timeline."""
    workers = range(timeline.pipeline)
    by_worker = [[e for e in timeline.events if e.worker == worker] for worker in workers]
    working = sum(event.end - event.start for event in timeline.events) / timeline.pipeline
    idle = timeline.length - working
    staleness = [_staleness(events, timeline) for events in by_worker]
    return ScheduleFigures(
        bubble=idle / working,
        idle_fraction=idle / timeline.length,
        activations=tuple(
            _count_stored_forwards(events) / timeline.virtual for events in by_worker
        ),
        weight_versions=tuple(updates + 1 for updates in staleness),
        staleness=tuple(staleness),
    )


def closed_form_bubble(timeline: SimulatedSchedule) -> float:
    """Return idle time divided by working time if messages take no time: (p−1)/m, or (p−1)/(mv)
    interleaved.

    PipeDream fills and drains the pipeline once over all iterations; the others once per iteration.
    """
    microbatches = timeline.microbatches
    if timeline.schedule.is_asynchronous:
        microbatches *= timeline.iterations
    return (timeline.pipeline - 1) / (microbatches * timeline.virtual)


def closed_form_activations(timeline: SimulatedSchedule) -> tuple[float, ...]:
    """Return the peak of stored activations by worker, in micro batches of a full stage."""
    pipeline, microbatches, virtual = timeline.pipeline, timeline.microbatches, timeline.virtual
    if timeline.schedule is PipelineSchedule.GPIPE:
        return (float(microbatches),) * pipeline
    if timeline.schedule.is_asynchronous:
        microbatches *= timeline.iterations
    chunks = (_warmup(worker, pipeline, virtual) + 1 for worker in range(pipeline))
    return tuple(min(count, microbatches * virtual) / virtual for count in chunks)


def _count_stored_forwards(events: list[Event]) -> int:
    """Return the maximum number of forwards whose backward has not ended."""
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start):
        current += 1 if event.step.direction is Pass.FORWARD else 0
        peak = max(peak, current)
        current -= 1 if event.step.direction is Pass.BACKWARD else 0
    return peak


def _staleness(events: list[Event], timeline: SimulatedSchedule) -> int:
    """Return the maximum number of updates between a micro batch's forward and its backward.

    PipeDream updates after every backward; others update only between iterations. With two weight
    versions, a batch uses the weights before the newest, so the first two batches use the same
    weights.
    """
    if timeline.schedule is PipelineSchedule.PIPEDREAM_2BW:
        return min(timeline.schedule.staleness(timeline.pipeline, 0), timeline.iterations - 1)
    if timeline.schedule is not PipelineSchedule.PIPEDREAM:
        return 0
    backwards = [e for e in events if e.step.direction is Pass.BACKWARD]
    starts = {e.step.microbatch: e.start for e in events if e.step.direction is Pass.FORWARD}
    ends = sorted(e.end for e in backwards)
    return max(
        bisect_right(ends, backward.start) - bisect_right(ends, starts[backward.step.microbatch])
        for backward in backwards
    )
