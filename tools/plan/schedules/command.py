"""`make schedules`: pipeline schedules beside one another."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from tools.plan.schedules.simulate import (
    COMPARED,
    Durations,
    ScheduleFigures,
    SimulatedSchedule,
    closed_form_activations,
    closed_form_bubble,
    figures,
    simulate,
)
from tools.spec.strategy import PipelineSchedule
from tools.text.table import Column, Table, rich_table
from tools.text.terminal import wide_console
from tools.text.units import percent, plural


def schedules(given: Namespace) -> int:
    """Simulate, print, draw.

    Raises:
        ValueError: What cannot be; one sentence.
    """
    durations = Durations(given.forward, given.backward, given.transfer)
    timelines = [
        simulate(
            schedule,
            given.pp,
            given.microbatches,
            iterations=given.iterations,
            virtual=given.vpp,
            durations=durations,
        )
        for schedule in COMPARED
        # One micro batch is too few for two versions, and enough to see what the others do.
        if schedule is not PipelineSchedule.PIPEDREAM_2BW or given.microbatches >= given.pp
    ]
    if given.json:
        print(json.dumps([timeline_as_data(timeline) for timeline in timelines], indent=2))
    else:
        _print(timelines)
    if given.svg:
        from tools.plan.schedules.picture import draw_schedules

        draw_schedules(timelines, given.svg)
    return 0


def schedules_arguments(parser: ArgumentParser) -> None:
    """What no variable says."""
    parser.add_argument("--iterations", type=int, default=2, help="PipeDream fills once over all")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a stage's forward")
    parser.add_argument("--backward", type=float, default=2.0, help="time of a stage's backward")
    parser.add_argument("--transfer", type=float, default=0.0, help="time of a message")


def timeline_as_data(timeline: SimulatedSchedule) -> dict[str, Any]:
    """One schedule's figures, measured and in closed form."""
    measured = figures(timeline)
    return {
        "schedule": timeline.schedule.paper_name,
        "length": timeline.length,
        "bubble": measured.bubble,
        "bubble_closed_form": closed_form_bubble(timeline),
        "idle_share": measured.idle_share,
        "activations": list(measured.activations),
        "activations_closed_form": list(closed_form_activations(timeline)),
        "weight_versions": list(measured.weight_versions),
        "staleness": list(measured.staleness),
    }


def _print(timelines: list[SimulatedSchedule]) -> None:
    first = timelines[0]
    title = (
        f"{first.pipeline} stages, {first.microbatches} micro batches an iteration, "
        f"{plural(first.iterations, 'iteration')}"
    )
    columns = (
        Column[_Measured]("schedule", lambda row: row[0].schedule.paper_name, right=False),
        Column[_Measured]("time", lambda row: row[0].length, "{:g}".format),
        Column[_Measured]("idle", lambda row: row[1].idle_share, percent),
        Column[_Measured]("bubble", lambda row: row[1].bubble, "{:.4f}".format),
        Column[_Measured]("closed form", lambda row: closed_form_bubble(row[0]), "{:.4f}".format),
        Column[_Measured]("held, by stage", lambda row: _listed(row[1].activations), wraps=True),
        Column[_Measured]("versions", lambda row: _listed(row[1].weight_versions), wraps=True),
        Column[_Measured]("staleness", lambda row: _listed(row[1].staleness), wraps=True),
    )
    rows = tuple((timeline, figures(timeline)) for timeline in timelines)
    console = wide_console()
    console.print(rich_table(Table(columns, rows, title), console.width))


_Measured = tuple[SimulatedSchedule, ScheduleFigures]


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
