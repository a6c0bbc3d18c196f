"""A plan as an SVG picture: memory against time of all examined candidates, and the memory of the winner's ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parakit.config.recompute import Recompute
from parakit.config.strategy import Parallelism
from parakit.costs import COMPONENTS, estimate_device_memory
from parakit.formatting.svg import svg_figure
from parakit.formatting.units import GIB
from parakit.planner.advice import StrategyFamily, strategy_family
from parakit.planner.search import Candidate, Plan, select_pareto_frontier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FAMILIES: dict[StrategyFamily | tuple[bool, bool], tuple[str, str]] = {
    StrategyFamily.SINGLE: ("one device", "#555555"),
    StrategyFamily.DATA: ("data parallel", "#0072B2"),
    StrategyFamily.SHARDED_DATA: ("sharded data parallel (ZeRO-2, 3)", "#56B4E9"),
    StrategyFamily.TENSOR: ("tensor parallel", "#D55E00"),
    StrategyFamily.CONTEXT: ("context parallel", "#CC79A7"),
    StrategyFamily.PIPELINE: ("pipeline parallel", "#009E73"),
    (True, False): ("tensor, no pipeline", "#E8956B"),
    (False, True): ("pipeline, no tensor", "#7BC8A4"),
    (True, True): ("tensor and pipeline", "#8C6BB1"),
    (False, False): ("other", "#B8A13A"),
}
"""Label and colour per kind of parallelism; of hybrids by whether they have tensor and pipeline parallelism."""
_COMPONENT_COLOURS = {
    "weights": "#0072B2",
    "gradients": "#56B4E9",
    "main_parameters": "#009E73",
    "optimizer_state": "#7BC8A4",
    "activations": "#E69F00",
    "temporaries": "#F0C987",
    "communication": "#CC79A7",
    "allocator": "#C9C9C9",
}
_NUM_LABELS = 4
_MANY_POINTS = 500
_TEXT_BACKGROUND = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture of a plan that has a winner to an SVG file."""
    with svg_figure(path, "plan", 11, 4.6) as figure:
        candidates_axes, ranks_axes = figure.subplots(1, 2, width_ratios=(1.7, 1))
        _draw_candidates(candidates_axes, plan)
        _draw_ranks(ranks_axes, plan)
        request = plan.request
        figure.suptitle(
            f"{request.model.name} on {request.cluster.devices} {request.cluster.device.name}, "
            f"global batch {request.global_batch:,}",
            fontweight="bold",
        )


def _draw_candidates(axes: Axes, plan: Plan) -> None:
    """Draw the examined candidates as points, and the Pareto frontier of time and memory as a line."""
    from matplotlib.ticker import LogLocator, NullFormatter

    families: dict[StrategyFamily | tuple[bool, bool], list[Candidate]] = {}
    shown = _select_points(plan)
    for candidate in shown:
        split = candidate.spec.parallelism
        family = strategy_family(split)
        hybrid = (split.tensor > 1, split.pipeline > 1)
        key = hybrid if family is StrategyFamily.HYBRID else family
        families.setdefault(key, []).append(candidate)
    size, opacity = (14, 0.6) if len(shown) < _MANY_POINTS else (7, 0.4)
    for shown_family, (label, colour) in _FAMILIES.items():
        if shown_family in families:
            times, sizes = _coordinates(families[shown_family])
            axes.scatter(times, sizes, s=size, alpha=opacity, color=colour, label=label)
    frontier = select_pareto_frontier(plan.examined)
    times, sizes = _coordinates(frontier)
    axes.plot(times, sizes, color="black", linewidth=1, label="not beaten in both")
    _label_points(axes, frontier)
    capacity = plan.request.cluster.device.memory_bytes / GIB
    axes.axhline(capacity, color="#B00020", linewidth=1, linestyle="--")
    alignment: dict[str, Any] = {
        "va": "bottom",
        "ha": "right",
        "transform": axes.get_yaxis_transform(),
    }
    axes.text(0.99, capacity, "device memory", color="#B00020", **alignment)
    axes.set_xscale("log")
    axes.set_ylim(0, capacity * 1.1)
    axes.set_xlabel("seconds per iteration (log scale)")
    axes.set_ylabel("GiB on the rank with the peak memory, closed form")
    axes.set_title("Time against memory: lower left is better", loc="left")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7.5, loc="upper right", bbox_to_anchor=(1, 0.9))


def _select_points(plan: Plan) -> list[Candidate]:
    """Return the candidates to draw: for each pair of strategy and recomputation, the Pareto frontier of time and
    memory.

    All examined candidates would be thousands of points, which take megabytes and hide one another.
    """
    groups: dict[tuple[Parallelism, Recompute], list[Candidate]] = {}
    for candidate in plan.examined:
        split = replace(candidate.spec.parallelism, virtual_stages=1)
        key = (split, candidate.spec.recompute)
        groups.setdefault(key, []).append(candidate)
    points: list[Candidate] = []
    for group in groups.values():
        points += select_pareto_frontier(group)
    return points


def _label_points(axes: Axes, frontier: list[Candidate]) -> None:
    """Write names of strategies at both ends of the frontier and at a few points between them.

    Each strategy is named once.
    """
    step = max(1, (len(frontier) - 1) // (_NUM_LABELS - 1)) if len(frontier) > 1 else 1
    chosen = {c.strategy: c for c in [*frontier[::-step][::-1], frontier[-1], frontier[0]]}
    for candidate in chosen.values():
        point = (candidate.seconds.total, candidate.memory.total / GIB)
        style: dict[str, Any] = {
            "xytext": (4, -9),
            "textcoords": "offset points",
            "bbox": _TEXT_BACKGROUND,
        }
        axes.annotate(candidate.strategy, point, fontsize=7.5, **style)


def _coordinates(candidates: list[Candidate]) -> tuple[list[float], list[float]]:
    """Return the candidates' seconds per iteration, and the GiB of their peak ranks."""
    times = [candidate.seconds.total for candidate in candidates]
    return times, [candidate.memory.total / GIB for candidate in candidates]


def _draw_ranks(axes: Axes, plan: Plan) -> None:
    """Draw the winner's memory by component, for its first, second and last pipeline ranks."""
    winner = plan.winner
    assert winner is not None
    pipeline = winner.spec.parallelism.pipeline
    ranks = sorted({0, min(1, pipeline - 1), pipeline - 1})
    device_bytes = plan.request.cluster.device.memory_bytes
    bars = [estimate_device_memory(winner.spec, rank, device_bytes) for rank in ranks]
    positions = range(len(ranks))
    bottoms = [0.0] * len(bars)
    for name in COMPONENTS:
        heights = [getattr(bar, name) / GIB for bar in bars]
        colour, label = _COMPONENT_COLOURS[name], name.replace("_", " ")
        axes.bar(positions, heights, 0.55, bottom=bottoms, color=colour, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    capacity = device_bytes / GIB
    axes.axhline(capacity, color="#B00020", linewidth=1, linestyle="--")
    for position, total in enumerate(bottoms):
        style: dict[str, Any] = {"ha": "center", "va": "bottom", "bbox": _TEXT_BACKGROUND}
        axes.text(position, total, f"{total:.1f}", **style)
    labels = [f"stage {rank}" if pipeline > 1 else "every rank" for rank in ranks]
    axes.set_xticks(positions, labels)
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    axes.set_ylim(0, capacity * 1.1)
    axes.set_ylabel("GiB")
    axes.set_title(f"Winner: {winner.strategy}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=7.5, **beside)
