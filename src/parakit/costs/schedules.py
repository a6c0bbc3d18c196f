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
    """Simulate a pipeline schedule and return its timeline.

    GPipe, 1F1B and interleaved 1F1B flush: the next iteration starts when all stages have finished the present
    iteration. PipeDream updates after every backward, and PipeDream-2BW updates once per iteration. Neither of
    them ever flushes.

    Args:
        virtual: Virtual stages per worker. Schedules other than the interleaved one ignore the value.
        forward: Time of a forward through all virtual stages of a worker.
        backward: Time of a backward through all virtual stages of a worker.
        transfer: Time of a message.

    Raises:
        ValueError: A size is below 1, there are too many steps, PP does not divide the micro batches of
            an interleaved schedule, or PipeDream-2BW has fewer micro batches than stages.
    """
    _refuse_impossible_sizes(schedule, pipeline, microbatches, iterations, virtual)
    if schedule is not PipelineSchedule.INTERLEAVED:
        virtual = 1
    # Pairs of the first micro batch and the number of micro batches between two flushes.
    rounds = [(0, microbatches * iterations)]
    if not schedule.is_asynchronous:
        rounds = [(index * microbatches, microbatches) for index in range(iterations)]
    seconds = {Pass.FORWARD: forward / virtual, Pass.BACKWARD: backward / virtual}
    events: list[Event] = []
    start = 0.0
    for first, count in rounds:
        steps_by_worker = [
            _order_steps(schedule, worker, pipeline, count, virtual) for worker in range(pipeline)
        ]
        events += _run_steps(steps_by_worker, first, start, virtual, seconds, transfer)
        start = max(event.end for event in events)
    return SimulatedSchedule(schedule, pipeline, microbatches, iterations, virtual, tuple(events))


def _refuse_impossible_sizes(
    schedule: PipelineSchedule, pipeline: int, microbatches: int, iterations: int, virtual: int
) -> None:
    """Raise an error if `simulate_schedule` cannot simulate a schedule with these sizes.

    Raises:
        ValueError: One of the reasons that `simulate_schedule` names.
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
    if schedule is PipelineSchedule.INTERLEAVED and microbatches % pipeline:
        raise ValueError(
            f"Interleaving needs micro batches in multiples of the {pipeline} stages, not "
            f"{microbatches}; use {round_up(microbatches, pipeline)}."
        )
    if schedule is PipelineSchedule.PIPEDREAM_2BW and microbatches < pipeline:
        raise ValueError(
            f"PipeDream-2BW needs as many micro batches as its {pipeline} stages (arXiv:2006.09503 "
            f"section 3.1), not {microbatches}; use {pipeline}."
        )


def _order_steps(
    schedule: PipelineSchedule, worker: int, pipeline: int, count: int, virtual: int
) -> list[Step]:
    """Return the steps of one worker in the order in which the schedule runs them, for `count` micro batches."""
    indices = range(count * virtual)
    forwards = [_virtual_step(Pass.FORWARD, index, pipeline, virtual) for index in indices]
    backwards = [_virtual_step(Pass.BACKWARD, index, pipeline, virtual) for index in indices]
    if schedule is PipelineSchedule.GPIPE:
        return forwards + backwards[::-1]
    warmup = min(_count_warmup_forwards(worker, pipeline, virtual), len(forwards))
    steps = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        steps += [forward, backward]
    return steps + backwards[len(forwards) - warmup :]


def _count_warmup_forwards(worker: int, pipeline: int, virtual: int) -> int:
    """Return the number of forwards that 1F1B runs on a worker before alternating with backwards."""
    stages_after = pipeline - worker - 1
    if virtual == 1:
        return stages_after
    return 2 * stages_after + (virtual - 1) * pipeline


def _virtual_step(direction: Pass, index: int, pipeline: int, virtual: int) -> Step:
    """Return the `index`-th forward or backward step in Megatron's interleaved order.

    A group of PP micro batches passes one chunk and then the next. Backward begins with the last chunk.
    """
    # A group takes `pipeline * virtual` steps: all its micro batches on one chunk, then on the next.
    group, position = divmod(index, pipeline * virtual)
    chunk = position // pipeline
    if direction is Pass.BACKWARD:
        chunk = virtual - 1 - chunk
    return Step(direction, group * pipeline + position % pipeline, chunk)


def _run_steps(
    steps_by_worker: list[list[Step]],
    first: int,
    start: float,
    virtual: int,
    seconds: Mapping[Pass, float],
    transfer: float,
) -> list[Event]:
    """Return the events of all workers. Each step starts as soon as its worker is free and its input has
    arrived.

    Args:
        steps_by_worker: The steps of each worker in order, with micro batches counted from 0.
        first: Number that the events give to micro batch 0, so that the micro batches of a later
            iteration continue the numbers of the iterations before.
        start: Time at which all workers are free.
        virtual: Virtual stages per worker.
        seconds: Duration of a pass through one virtual stage.
        transfer: Duration of a message between two workers.
    """
    pipeline = len(steps_by_worker)
    end_by_step: dict[tuple[int, Step], float] = {}
    free_at, next_index = [start] * pipeline, [0] * pipeline
    events: list[Event] = []
    remaining = sum(len(steps) for steps in steps_by_worker)
    while remaining:
        remaining_before = remaining
        for worker, steps in enumerate(steps_by_worker):
            while next_index[worker] < len(steps):
                step = steps[next_index[worker]]
                source = _find_source(step, worker, pipeline, virtual)
                if source is None:
                    input_arrives = 0.0
                elif source in end_by_step:
                    source_worker, _ = source
                    delay = transfer if source_worker != worker else 0.0
                    input_arrives = end_by_step[source] + delay
                else:
                    # The worker waits. Other workers run on until they have sent its input.
                    break
                begin = max(free_at[worker], input_arrives)
                end = begin + seconds[step.direction]
                end_by_step[worker, step] = free_at[worker] = end
                numbered_step = Step(step.direction, step.microbatch + first, step.chunk)
                events.append(Event(worker, numbered_step, begin, end))
                next_index[worker] += 1
                remaining -= 1
        if remaining == remaining_before:
            raise RuntimeError("The schedule deadlocks.")
    return events


def _find_source(step: Step, worker: int, pipeline: int, virtual: int) -> tuple[int, Step] | None:
    """Return the worker and the step whose output this step needs.

    The result is None for a forward on the first stage. The backward on the last stage needs its own forward.
    """
    is_forward, stage = step.direction is Pass.FORWARD, step.chunk * pipeline + worker
    if is_forward and stage == 0:
        return None
    if not is_forward and stage == pipeline * virtual - 1:
        return worker, Step(Pass.FORWARD, step.microbatch, step.chunk)
    source_stage = stage - 1 if is_forward else stage + 1
    chunk, neighbour = divmod(source_stage, pipeline)
    return neighbour, Step(step.direction, step.microbatch, chunk)


@dataclass(frozen=True)
class ScheduleFigures:
    """Figures of a simulated timeline: idle time, stored activations, weight versions and staleness."""

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
    """Measure idle time, stored activations, weight versions and staleness of a simulated timeline."""
    events_by_worker: list[list[Event]] = [[] for _ in range(timeline.pipeline)]
    for event in timeline.events:
        events_by_worker[event.worker].append(event)
    working = sum(event.end - event.start for event in timeline.events) / timeline.pipeline
    idle = timeline.length - working
    stored_forwards = [_count_stored_forwards(events) for events in events_by_worker]
    staleness = [_count_stale_updates(events, timeline) for events in events_by_worker]
    return ScheduleFigures(
        bubble=idle / working,
        idle_fraction=idle / timeline.length,
        activations=tuple(count / timeline.virtual for count in stored_forwards),
        weight_versions=tuple(updates + 1 for updates in staleness),
        staleness=tuple(staleness),
    )


def closed_form_bubble(timeline: SimulatedSchedule) -> float:
    """Return idle time divided by working time, from a formula that ignores the time of messages.

    The formula is (p−1)/m, or (p−1)/(mv) for the interleaved schedule. PipeDream and PipeDream-2BW fill and
    drain the pipeline once over all iterations, so m is then the micro batches of all iterations.
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
    chunks = (_count_warmup_forwards(worker, pipeline, virtual) + 1 for worker in range(pipeline))
    return tuple(min(count, microbatches * virtual) / virtual for count in chunks)


def _count_stored_forwards(events: list[Event]) -> int:
    """Return the largest number of forwards of one worker whose activations are stored at the same time.

    The activations of a forward are stored until the start of its backward.
    """
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start):
        if event.step.direction is Pass.FORWARD:
            current += 1
            peak = max(peak, current)
        else:
            current -= 1
    return peak


def _count_stale_updates(events: list[Event], timeline: SimulatedSchedule) -> int:
    """Return the maximum number of updates between a micro batch's forward and its backward.

    PipeDream updates after every backward. GPipe and 1F1B update only between iterations, so the result is 0 for
    them. PipeDream-2BW has two weight versions, and its result follows from a formula.
    """
    if timeline.schedule is PipelineSchedule.PIPEDREAM_2BW:
        return min(timeline.schedule.staleness(timeline.pipeline, 0), timeline.iterations - 1)
    if timeline.schedule is not PipelineSchedule.PIPEDREAM:
        return 0
    forward_starts: dict[int, float] = {}
    backwards: list[Event] = []
    for event in events:
        if event.step.direction is Pass.FORWARD:
            forward_starts[event.step.microbatch] = event.start
        else:
            backwards.append(event)
    # Each backward ends with an update.
    update_times = sorted(backward.end for backward in backwards)
    most_updates = 0
    for backward in backwards:
        forward_start = forward_starts[backward.step.microbatch]
        updates_before_forward = bisect_right(update_times, forward_start)
        updates_before_backward = bisect_right(update_times, backward.start)
        most_updates = max(most_updates, updates_before_backward - updates_before_forward)
    return most_updates
