"""The command `make schedules`: pipeline schedules compared as a table, as JSON, or as an SVG picture.

The picture has one time axis for all schedules and shows which stage computes which micro batch, idle time in grey.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from parakit.config.strategy import PipelineSchedule
from parakit.costs import (
    COMPARED_SCHEDULES,
    Pass,
    ScheduleFigures,
    SimulatedSchedule,
    closed_form_activations,
    closed_form_bubble,
    measure_schedule,
    simulate_schedule,
)
from parakit.formatting.svg import svg_figure
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import wide_console
from parakit.formatting.units import percent, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORWARD = ("#4C86C6", "#9CC0E7")
_BACKWARD = ("#3E9C6B", "#98D3B2")
"""Dark and light colour, for even and odd virtual stages."""
_IDLE = "#DDDDDD"
_NARROWEST_LABEL, _NARROW_LABEL = 0.7, 1.2
"""Widths of an event, in percent of the time axis, below which its label is left out or small."""


def schedules(variables: Namespace) -> int:
    """Simulate all pipeline schedules, print them as a table or JSON, and return 0.

    If SVG= names a file, the schedules are also drawn. PipeDream-2BW is left out if there are fewer micro batches than
    stages.

    Raises:
        ValueError: A schedule is not possible. The message is one sentence.
    """
    timelines = [
        simulate_schedule(
            schedule,
            variables.pp,
            variables.microbatches,
            iterations=variables.iterations,
            virtual=variables.vpp,
            forward=variables.forward,
            backward=variables.backward,
            transfer=variables.transfer,
        )
        for schedule in COMPARED_SCHEDULES
        # PipeDream-2BW needs as many micro batches as stages for its two weight versions.
        if schedule is not PipelineSchedule.PIPEDREAM_2BW or variables.microbatches >= variables.pp
    ]
    if variables.json:
        print(json.dumps([_encode_timeline(timeline) for timeline in timelines], indent=2))
    else:
        _print_table(timelines)
    if variables.svg:
        _draw_all(timelines, variables.svg)
    return 0


def schedules_arguments(parser: ArgumentParser) -> None:
    """Add the options of `schedules` that no variable of make sets."""
    parser.add_argument("--iterations", type=int, default=2, help="PipeDream fills once over all")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a stage's forward")
    parser.add_argument("--backward", type=float, default=2.0, help="time of a stage's backward")
    parser.add_argument("--transfer", type=float, default=0.0, help="time of a message")


def _encode_timeline(timeline: SimulatedSchedule) -> dict[str, Any]:
    """Return a dictionary for JSON with the figures of a simulated schedule, and of its closed form."""
    measured = measure_schedule(timeline)
    return {
        "schedule": timeline.schedule.paper_name,
        "length": timeline.length,
        "bubble": measured.bubble,
        "bubble_closed_form": closed_form_bubble(timeline),
        "idle_share": measured.idle_fraction,
        "activations": list(measured.activations),
        "activations_closed_form": list(closed_form_activations(timeline)),
        "weight_versions": list(measured.weight_versions),
        "staleness": list(measured.staleness),
    }


def _print_table(timelines: list[SimulatedSchedule]) -> None:
    """Print a table with one row per schedule: its time, idle time, stored activations and weight versions."""
    first = timelines[0]
    title = (
        f"{first.pipeline} stages, {first.microbatches} micro batches per iteration, "
        f"{plural(first.iterations, 'iteration')}"
    )
    columns = (
        Column[_Measured]("schedule", lambda row: row.timeline.schedule.paper_name, right=False),
        Column[_Measured]("time", lambda row: row.timeline.length, "{:g}".format),
        Column[_Measured]("idle", lambda row: row.figures.idle_fraction, percent),
        Column[_Measured]("bubble", lambda row: row.figures.bubble, _format_bubble),
        Column[_Measured](
            "closed form", lambda row: closed_form_bubble(row.timeline), _format_bubble
        ),
        Column[_Measured]("stored, by stage", _stored_activations, wraps=True),
        Column[_Measured]("versions", _weight_versions, wraps=True),
        Column[_Measured]("staleness", _staleness, wraps=True),
    )
    rows = tuple(_Measured(timeline, measure_schedule(timeline)) for timeline in timelines)
    console = wide_console()
    console.print(rich_table(Table(columns, rows, title), console.width))


class _Measured(NamedTuple):
    """Timeline of a schedule, and what was measured of it."""

    timeline: SimulatedSchedule
    figures: ScheduleFigures


def _format_bubble(bubble: float) -> str:
    """Return idle time over working time with four decimals."""
    return f"{bubble:.4f}"


def _stored_activations(row: _Measured) -> str:
    """Return the stored activations by stage, in micro batches."""
    return _join_numbers(row.figures.activations)


def _weight_versions(row: _Measured) -> str:
    """Return the number of weight versions by stage."""
    return _join_numbers(row.figures.weight_versions)


def _staleness(row: _Measured) -> str:
    """Return by how many updates the weights of a gradient are older than the newest, by stage."""
    return _join_numbers(row.figures.staleness)


def _join_numbers(values: Sequence[float]) -> str:
    """Return numbers with spaces between."""
    return " ".join(f"{value:g}" for value in values)


def _draw_all(timelines: Sequence[SimulatedSchedule], path: Path) -> None:
    """Write all schedules as an SVG picture, one above another."""
    from matplotlib.patches import Patch

    pipeline = timelines[0].pipeline
    longest = max(timeline.length for timeline in timelines)
    height = len(timelines) * (0.75 + 0.26 * pipeline) + 0.6
    with svg_figure(path, "schedules", 12, height) as figure:
        panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, timeline in zip(panels, timelines, strict=True):
            _draw_schedule(axes, timeline, longest)
        panels[-1].set_xlabel("time, in forward passes of a full stage")
        kinds = {"forward": _FORWARD[0], "backward": _BACKWARD[0]}
        if any(timeline.virtual > 1 for timeline in timelines):
            kinds |= {"forward, odd virtual stage": _FORWARD[1]}
            kinds |= {"backward, odd virtual stage": _BACKWARD[1]}
        kinds["idle"] = _IDLE
        figure.legend(
            handles=[Patch(color=colour, label=label) for label, colour in kinds.items()],
            loc="outside lower right",
            ncols=5,
            frameon=False,
        )


def _draw_schedule(axes: Axes, timeline: SimulatedSchedule, longest: float) -> None:
    """Draw the timeline of one schedule, one row per stage. The time axis ends at `longest`."""
    axes.broken_barh([(0, timeline.length)], (-0.42, timeline.pipeline - 1 + 0.84), color=_IDLE)
    spans: dict[int, list[tuple[float, float]]] = {}
    colours: dict[int, list[str]] = {}
    for event in timeline.events:
        is_odd = event.step.chunk % 2 == 1
        duration = event.end - event.start
        dark, light = _FORWARD if event.step.direction is Pass.FORWARD else _BACKWARD
        colour = light if is_odd else dark
        spans.setdefault(event.worker, []).append((event.start, duration))
        colours.setdefault(event.worker, []).append(colour)
        width = 100 * duration / longest
        if width > _NARROWEST_LABEL:
            # Micro batches are numbered within their iteration.
            number = str(event.step.microbatch % timeline.microbatches + 1)
            style: dict[str, Any] = {
                "fontsize": 6.5 if width > _NARROW_LABEL else 5,
                "ha": "center",
                "va": "center",
            }
            middle = (event.start + event.end) / 2
            label = axes.text(
                middle, event.worker, number, color="black" if is_odd else "white", **style
            )
            # The layout ignores the labels, because they lie inside their bars and measuring hundreds of them takes
            # long.
            label.set_in_layout(False)
    for worker, stage_spans in spans.items():
        # There is one call per stage, because matplotlib computes the limits of the axes anew at each call.
        bar: dict[str, Any] = {
            "facecolors": colours[worker],
            "edgecolor": "white",
            "linewidth": 0.5,
        }
        axes.broken_barh(stage_spans, (worker - 0.42, 0.84), **bar)
    axes.set_yticks(range(timeline.pipeline), [f"stage {i}" for i in range(timeline.pipeline)])
    axes.invert_yaxis()
    axes.set_xlim(0, longest)
    axes.set_title(_caption(timeline), loc="left", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _caption(timeline: SimulatedSchedule) -> str:
    """Return a schedule's name, idle time, stored activations and weight versions as a title."""
    measured = measure_schedule(timeline)
    most_stored = max(measured.activations)
    text = (
        f"{timeline.schedule.paper_name}: idle {100 * measured.idle_fraction:.0f}% of the time, at most "
        f"{most_stored:g} micro batches stored by a stage"
    )
    versions = max(measured.weight_versions)
    if versions > 1:
        text += f", up to {versions} weight versions, gradients up to {versions - 1} updates old"
    return text
