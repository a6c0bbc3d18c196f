"""One traced iteration as data and as a picture: a lane a rank, micro batches numbered, idle in grey.

Under a pipeline's measured schedule stands the ideal one, on the same axis: equal stages that take the
measured mean of a pass, and messages that take no time. In a report's charts, and as `trace` on the
command line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from parakit.artifacts.run import TRACE_FILE
from parakit.config.strategy import Parallelism
from parakit.costs import Pass, Phase, SimulatedSchedule, Step, simulate_schedule
from parakit.formatting.terminal import say
from parakit.logs import Run, find_run_folders, load_folder, read_trace_events
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.time_shares import mean
from parakit.reporting.canvas import INK, Chart, draw_chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD, BACKWARD, IDLE = ("#4c86c6", "#9cc0e7"), ("#3e9c6b", "#98d3b2"), "#c9c9c9"
"""Dark and light by virtual stage, as in the planner's schedules."""
_PHASES: dict[str, str] = {Phase.GRADIENT_SYNC: "#d9822b", Phase.OPTIMIZER: "#8c6bb1"}
_CALL = "#b2182b"
MAX_RANKS = 16
_WIDTH_INCHES = 9.0
_LANE, _CALLS = 0.62, 0.16
"""Heights of a rank's lane and of the thin one for its calls, in units of one rank."""
_NARROWEST_LABEL = 0.012
"""Of the axis' length; narrower passes carry no number."""


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
    found: list[TraceSpan] = []
    for rank in sorted({piece.rank for piece in pieces}):
        own = sorted((p for p in pieces if p.rank == rank), key=lambda p: (p.start_ms, -p.end_ms))
        steps = _steps(rank, split, microbatches)
        for piece in own:
            # Numbered as the schedule orders them on this rank's stage.
            order = steps[_PASSES[piece.name]] if piece.name in _PASSES else []
            found.append(replace(piece, step=order.pop(0)) if order else piece)
    return tuple(found)


def _steps(rank: int, split: Parallelism, microbatches: int) -> dict[Pass, list[Step]]:
    if split.pipeline == 1:
        return {way: [Step(way, n) for n in range(microbatches)] for way in _PASSES.values()}
    worker, schedule, virtual = (
        split.pipeline_rank(rank),
        split.executed_schedule,
        split.virtual_stages,
    )
    timeline = simulate_schedule(schedule, split.pipeline, microbatches, virtual=virtual)
    events = sorted(timeline.events, key=lambda event: event.start)
    own = [event.step for event in events if event.worker == worker]
    return {way: [step for step in own if step.direction is way] for way in _PASSES.values()}


def select_passes(pieces: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Forward and backward passes, outermost spans only."""
    return [piece for piece in pieces if piece.name in _PASSES]


def traced_idle_over_work(pieces: Sequence[TraceSpan]) -> dict[int, float]:
    """Idle over working time of each rank, from the first forward to the last backward."""
    found, busy = select_passes(pieces), defaultdict[int, float](float)
    for piece in found:
        busy[piece.rank] += piece.milliseconds
    start, end = _span(found)
    return {rank: (end - start) / work - 1 for rank, work in sorted(busy.items()) if work}


def _span(pieces: Sequence[TraceSpan]) -> tuple[float, float]:
    """When the first begins and the last ends, in ms."""
    starts, ends = [p.start_ms for p in pieces], [p.end_ms for p in pieces]
    return min(starts, default=0.0), max(ends, default=0.0)


@dataclass(frozen=True)
class Scene:
    """One iteration to draw."""

    name: str
    title: str
    pieces: tuple[TraceSpan, ...]
    split: Parallelism
    microbatches: int
    on_gpu: bool
    """Then the trace, taken on the host, shows when kernels were launched."""

    @cached_property
    def ideal(self) -> SimulatedSchedule:
        """The same schedule with equal stages of the measured mean duration."""
        split = self.split
        worked = [(piece.step, piece.milliseconds) for piece in select_passes(self.pieces)]
        forward, backward = (
            split.virtual_stages * mean(ms for step, ms in worked if step and step.direction is way)
            for way in (Pass.FORWARD, Pass.BACKWARD)
        )
        return simulate_schedule(
            *(split.executed_schedule, split.pipeline, self.microbatches),
            virtual=split.virtual_stages,
            forward=forward,
            backward=backward,
        )


def draw_iteration(scene: Scene) -> Chart:
    """The picture, with what it shows in words."""
    return draw_chart(scene.name, scene.title, describe_scene(scene), partial(_paint, scene=scene))


def describe_scene(scene: Scene) -> str:
    """What is to be seen, with its numbers."""
    idle = traced_idle_over_work(scene.pieces)
    text = (
        "One iteration on one time axis: numbers are micro batches, the thin lane is communication "
        "from its call to its result."
    )
    if scene.on_gpu:
        return f"{text} The host's clock: kernels were launched then, and ran later."
    if scene.split.pipeline == 1 or not idle:
        return text
    measured = ", ".join(f"rank {rank} {share:.0%}" for rank, share in idle.items())
    bubble = mean(traced_idle_over_work(_ideal_pieces(scene.ideal)).values())
    return (
        f"{text} Idle in this iteration between the first forward and the last backward, over the "
        f"work: {measured}; with equal stages and free messages the bubble of "
        f"{scene.ideal.schedule.paper_name} is {bubble:.0%} of the work."
    )


def _ideal_pieces(timeline: SimulatedSchedule) -> tuple[TraceSpan, ...]:
    names = {direction: name for name, direction in _PASSES.items()}
    return tuple(
        TraceSpan(e.worker, names[e.step.direction], "", e.start, e.end, e.step)
        for e in timeline.events
    )


def _paint(figure: Figure, scene: Scene) -> None:
    ranks = sorted({piece.rank for piece in scene.pieces})[:MAX_RANKS]
    shown = [piece for piece in scene.pieces if piece.rank in ranks]
    origin, end = _span(shown)
    length = end - origin
    rows, has_ideal = [len(ranks)], scene.split.pipeline > 1
    if has_ideal:  # Longer than what was traced if passes are missing from the trace.
        length = max(length, scene.ideal.length)
        rows.append(scene.split.pipeline)
    figure.set_size_inches(_WIDTH_INCHES, 0.75 + sum(0.32 + 0.42 * count for count in rows))
    panels = figure.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows}
    )[:, 0]
    names = [f"rank {rank}" for rank in ranks]
    _panel(panels[0], shown, origin, length, names)
    panels[0].set_title("measured", fontsize=9)
    if has_ideal:
        stages = [f"stage {stage}" for stage in range(scene.split.pipeline)]
        _panel(panels[1], _ideal_pieces(scene.ideal), 0.0, length, stages)
        title = f"ideal {scene.ideal.schedule.paper_name}, equal stages, free messages"
        panels[1].set_title(title, fontsize=9)
    panels[-1].set_xlabel("ms")
    _legend(figure, shown)


def _panel(
    axes: Axes, pieces: Sequence[TraceSpan], origin: float, length: float, names: Sequence[str]
) -> None:
    places = {rank: place for place, rank in enumerate(sorted({p.rank for p in pieces}))}
    if worked := select_passes(pieces):
        start, end = _span(worked)
        for place in places.values():
            lane = (place - _LANE / 2, _LANE)
            axes.broken_barh([(start - origin, end - start)], lane, facecolor=IDLE, linewidth=0)
    for piece in pieces:
        # Waiting is the grey behind, and outer spans hold inner ones.
        colour = _PHASES.get(piece.category)
        if piece.step:
            shades = FORWARD if piece.step.direction is Pass.FORWARD else BACKWARD
            colour = shades[piece.step.chunk % 2]
        if colour is None:
            continue
        place, left, width = places[piece.rank], piece.start_ms - origin, piece.milliseconds
        edge = {"linewidth": 0.4, "edgecolor": "white"} if piece.step else {"linewidth": 0}
        axes.broken_barh([(left, width)], (place - _LANE / 2, _LANE), facecolor=colour, **edge)
        if piece.step and width > _NARROWEST_LABEL * length:
            text, hue = str(piece.step.microbatch + 1), "black" if piece.step.chunk % 2 else "white"
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "clip_on": True}
            number = axes.text(left + width / 2, place, text, color=hue, **look)
            number.set_in_layout(False)
    for rank, place in places.items():
        calls = _joined([p for p in pieces if p.is_call and p.rank == rank], length / 1000)
        bars = [(start - origin, end - start) for start, end in calls]
        axes.broken_barh(bars, (place + _LANE / 2 + 0.02, _CALLS), facecolor=_CALL, linewidth=0)
    axes.set_yticks(range(len(places)), list(names))
    axes.set_ylim(len(places) - 0.45, -0.45)
    axes.set_xlim(0, length)
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _joined(calls: Sequence[TraceSpan], gap: float) -> list[tuple[float, float]]:
    """Spans of calls; those closer than `gap` are drawn as one, a run has hundreds of them."""
    spans: list[tuple[float, float]] = []
    for call in sorted(calls, key=lambda piece: piece.start_ms):
        if spans and call.start_ms - spans[-1][1] < gap:
            spans[-1] = (spans[-1][0], max(spans[-1][1], call.end_ms))
        else:
            spans.append((call.start_ms, call.end_ms))
    return spans


def _legend(figure: Figure, pieces: Sequence[TraceSpan]) -> None:
    from matplotlib.patches import Patch

    kinds = {"forward": FORWARD[0], "backward": BACKWARD[0]}
    if any(piece.step and piece.step.chunk for piece in pieces):
        kinds |= {"forward, 2nd part": FORWARD[1], "backward, 2nd part": BACKWARD[1]}
    kinds |= {phase.replace("_", " "): colour for phase, colour in _PHASES.items()}
    kinds |= {"communication": _CALL, "idle": IDLE}
    handles = [Patch(color=colour, label=label) for label, colour in kinds.items()]
    look: dict[str, Any] = {"fontsize": 8, "handlelength": 1, "columnspacing": 1}
    figure.legend(handles=handles, loc="outside upper left", ncols=8, labelcolor=INK, **look)


PICTURE = "timeline.svg"
MAX_PICTURES = 8


class NoTraceError(ValueError):
    """There is nothing to draw; the message says what is missing and how to get it."""


def draw_timelines(entries: Sequence[Entry]) -> list[Chart]:
    """A picture for every entry that left a trace, the first eight."""
    charts: list[Chart] = []
    for entry in entries:
        if len(charts) < MAX_PICTURES and (entry.run.path / TRACE_FILE).is_file():
            with suppress(NoTraceError):
                scene = build_scene(entry.run, f"timeline-{len(charts) + 1}", entry.label)
                charts.append(draw_iteration(scene))
    return charts


def build_scene(run: Run, name: str = "timeline", label: str = "") -> Scene:
    """What to draw of a run.

    Raises:
        NoTraceError: It left no usable trace, or its split is not known.
    """
    spec = run.spec
    if spec is None:
        why = "does not record how it was split, so its passes cannot be placed"
        raise NoTraceError(f"{run.name} {why}.")
    if not spec.microbatches:
        raise NoTraceError(f"{run.name} does not record its micro batch, so passes have no number.")
    try:
        pieces = read_trace(run.path, spec.parallelism, spec.microbatches)
    except FileNotFoundError:
        why = f"has no {TRACE_FILE}; train at least 5 iterations with the ledger on"
        raise NoTraceError(f"{run.name} {why}.") from None
    except (OSError, ValueError) as error:
        raise NoTraceError(f"{run.name}: {TRACE_FILE} cannot be used ({error}).") from None
    # Calls in groups of one rank are left out: Megatron makes them, nothing moves.
    record = run.measurements.communication
    single = {c.group for r in record.ranks for c in r.calls if c.ranks == 1} if record else set()
    shown = tuple(piece for piece in pieces if not (piece.is_call and piece.group in single))
    if not shown:
        raise NoTraceError(f"{run.name} traced nothing; train at least 5 iterations.")
    title = f"Iteration of {label or run.strategy}, {run.model}"
    return Scene(name, title, shown, spec.parallelism, spec.microbatches, run.device != "cpu")


def write_timeline(run: Run) -> tuple[Path, str]:
    """Draw a run's iteration into its folder; gives the picture and what it shows.

    Raises:
        NoTraceError: As `scene_of`.
    """
    chart, path = draw_iteration(build_scene(run)), run.path / PICTURE
    path.write_text(chart.svg)
    return path, chart.text


def trace_run(wanted: str | None, root: Path, console: Console) -> int:
    """Draw the traced iteration of a run and say where picture and trace are; 1 if it has none."""
    try:
        run = find_run(wanted, root)
        picture, text = write_timeline(run)
    except NoTraceError as error:
        console.print(str(error), markup=False)
        return 1
    console.print(text, markup=False)
    say(console, f"Picture: {picture}")
    say(console, f"Trace:   {run.path / TRACE_FILE} (open in ui.perfetto.dev or chrome://tracing)")
    return 0


def find_run(wanted: str | None, root: Path) -> Run:
    """A run folder by path, or the newest of a target such as `pp2-gpt2-tiny-2cpu`, or the newest.

    Raises:
        NoTraceError: There is no such run.
    """
    if wanted and Path(wanted).is_dir():
        return load_folder(Path(wanted))
    target = (wanted or "").removeprefix("train-").removeprefix("trace-")
    folders = [f for f in find_run_folders(root) if not target or f.name.endswith(f"-{target}")]
    if not folders:
        what = f"of {target} " if target else ""
        raise NoTraceError(
            f"There is no run {what}in {root}; make trace-<strategy>-<model>-<N>cpu trains one."
        )
    return load_folder(folders[-1])
