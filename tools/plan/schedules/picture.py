"""Pipeline schedules above one another on one time axis, as SVG: who computes what, idle in grey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.plan.schedules.simulate import Event, Pass, SimulatedSchedule, figures
from tools.text.svg import svg_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORWARD = ("#4C86C6", "#9CC0E7")
_BACKWARD = ("#3E9C6B", "#98D3B2")
"""Dark and light by virtual stage."""
_IDLE = "#DDDDDD"


def draw_schedules(timelines: Sequence[SimulatedSchedule], path: Path) -> None:
    """Write the picture."""
    from matplotlib.patches import Patch

    pipeline = timelines[0].pipeline
    longest = max(timeline.length for timeline in timelines)
    height = len(timelines) * (0.75 + 0.26 * pipeline) + 0.6
    with svg_figure(path, "schedules", 12, height) as figure:
        panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, timeline in zip(panels, timelines, strict=True):
            _draw(axes, timeline, longest)
        panels[-1].set_xlabel("time, in forward passes of a whole stage")
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


def _draw(axes: Axes, timeline: SimulatedSchedule, longest: float) -> None:
    axes.broken_barh([(0, timeline.length)], (-0.42, timeline.pipeline - 1 + 0.84), color=_IDLE)
    for event in timeline.events:
        axes.broken_barh(
            [(event.start, event.end - event.start)],
            (event.worker - 0.42, 0.84),
            facecolor=_colour(event),
            edgecolor="white",
            linewidth=0.5,
        )
        width = 100 * (event.end - event.start) / longest
        if width > _NARROWEST_LABEL:
            _number(axes, event, timeline, 6.5 if width > _NARROW_LABEL else 5)
    axes.set_yticks(range(timeline.pipeline), [f"stage {i}" for i in range(timeline.pipeline)])
    axes.invert_yaxis()
    axes.set_xlim(0, longest)
    axes.set_title(caption(timeline), loc="left", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def caption(timeline: SimulatedSchedule) -> str:
    """The schedule's name and what it costs, in one line."""
    measured = figures(timeline)
    held = max(measured.activations)
    text = (
        f"{timeline.schedule.paper_name}: idle {100 * measured.idle_share:.0f}% of the time, at most "
        f"{held:g} micro batches held by a stage"
    )
    versions = max(measured.weight_versions)
    if versions > 1:
        text += f", up to {versions} weight versions, gradients up to {versions - 1} updates old"
    return text


_NARROWEST_LABEL, _NARROW_LABEL = 0.7, 1.2
"""Percent of the axis."""


def _number(axes: Axes, event: Event, timeline: SimulatedSchedule, size: float) -> None:
    """Micro batches are numbered within their iteration."""
    axes.text(
        (event.start + event.end) / 2,
        event.worker,
        str(event.step.microbatch % timeline.microbatches + 1),
        ha="center",
        va="center",
        fontsize=size,
        color="white" if event.step.chunk % 2 == 0 else "black",
    )


def _colour(event: Event) -> str:
    shades = _FORWARD if event.step.direction is Pass.FORWARD else _BACKWARD
    return shades[event.step.chunk % 2]
