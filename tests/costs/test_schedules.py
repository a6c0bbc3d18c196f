from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.strategy import PipelineSchedule
from parakit.costs.schedules import (
    COMPARED_SCHEDULES,
    Pass,
    SimulatedSchedule,
    closed_form_activations,
    closed_form_bubble,
    measure_schedule,
    simulate_schedule,
)

STAGES = st.integers(1, 6)


@st.composite
def timelines(draw: st.DrawFn) -> SimulatedSchedule:
    pipeline, groups = draw(STAGES), draw(st.integers(1, 3))
    schedule = draw(st.sampled_from(COMPARED_SCHEDULES))
    iterations, virtual = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    backward = draw(st.sampled_from([1.0, 2.0, 3.0]))
    return simulate_schedule(
        schedule,
        pipeline,
        pipeline * groups,
        iterations=iterations,
        virtual=virtual,
        backward=backward,
    )


@given(timelines())
def test_the_simulated_bubble_is_the_closed_form(timeline: SimulatedSchedule) -> None:
    assert measure_schedule(timeline).bubble == pytest.approx(closed_form_bubble(timeline))


@given(timelines())
def test_the_simulated_activations_are_the_closed_form(timeline: SimulatedSchedule) -> None:
    assert measure_schedule(timeline).activations == pytest.approx(
        closed_form_activations(timeline)
    )


@given(timelines())
def test_worker_runs_every_task_once_without_overlap(timeline: SimulatedSchedule) -> None:
    for worker in range(timeline.pipeline):
        events = sorted((e for e in timeline.events if e.worker == worker), key=lambda e: e.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(events))
        steps = [event.step for event in events]
        assert len(set(steps)) == len(steps)
        assert len(steps) == 2 * timeline.microbatches * timeline.iterations * timeline.virtual


@given(timelines())
def test_backward_never_runs_before_its_forward(timeline: SimulatedSchedule) -> None:
    ends = {(e.worker, e.step): e.end for e in timeline.events}
    for (worker, step), end in ends.items():
        if step.direction is Pass.BACKWARD:
            forward = type(step)(Pass.FORWARD, step.microbatch, step.chunk)
            assert ends[worker, forward] < end


def test_pipedream_stores_a_weight_version_per_micro_batch_in_flight() -> None:
    measured = measure_schedule(simulate_schedule(PipelineSchedule.PIPEDREAM, 4, 8))
    assert measured.weight_versions == (4, 3, 2, 1)
    assert measured.staleness == (3, 2, 1, 0)


def test_flushing_schedules_store_a_single_weight_version_without_staleness() -> None:
    for schedule in (
        PipelineSchedule.GPIPE,
        PipelineSchedule.ONE_F_ONE_B,
        PipelineSchedule.INTERLEAVED,
    ):
        measured = measure_schedule(simulate_schedule(schedule, 4, 8))
        assert set(measured.weight_versions) == {1}
        assert set(measured.staleness) == {0}


def test_published_pp2_run_is_idle_for_as_long_as_it_computes() -> None:
    assert measure_schedule(simulate_schedule(PipelineSchedule.ONE_F_ONE_B, 2, 1)).bubble == 1


def test_messages_lengthen_the_pipeline() -> None:
    quick = simulate_schedule(PipelineSchedule.ONE_F_ONE_B, 4, 8)
    slow = simulate_schedule(PipelineSchedule.ONE_F_ONE_B, 4, 8, transfer=0.5)
    assert slow.length > quick.length


def test_interleaving_refuses_an_uneven_number_of_micro_batches() -> None:
    with pytest.raises(ValueError, match=r"multiples of the 4 stages, not 6; use 8\."):
        simulate_schedule(PipelineSchedule.INTERLEAVED, 4, 6)
    with pytest.raises(ValueError, match="start at 1"):
        simulate_schedule(PipelineSchedule.GPIPE, 0, 6)
