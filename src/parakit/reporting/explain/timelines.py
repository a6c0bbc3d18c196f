"""Read one traced iteration of a run and draw it: one lane per rank, micro batches numbered, idle in grey.

The input is a run's trace file (`trace.json`). Below a pipeline's measured schedule the picture has the ideal schedule
on the same time axis. There all stages take the measured mean time per pass, and messages take no time. The report
draws these pictures, and `parakit trace` does so for one run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Colours by virtual stage: dark for even, light for odd, as in the planner's schedules."""
_PHASE_COLOURS: dict[str, str] = {Phase.GRADIENT_SYNC: "#d9822b", Phase.OPTIMIZER: "#8c6bb1"}
_CALL_COLOUR = "#b2182b"
MAX_RANKS = 16
_WIDTH_INCHES = 9.0
_LANE_HEIGHT, _CALL_HEIGHT = 0.62, 0.16
"""Heights of a rank's lane and of the thin lane of its calls; the distance between ranks is 1."""
_CALL_DISTANCE = 0.02
"""Distance between a lane and the thin lane of its calls."""
_MIN_LABELLED_FRACTION = 0.012
"""Fraction of the time axis; passes that are shorter carry no number."""
_JOINED_GAP_FRACTION = 1 / 1000
"""Fraction of the time axis; calls that are closer are drawn as one."""


_COMMUNICATION = "communication"
_PASSES = {"forward-compute": Pass.FORWARD, "backward-compute": Pass.BACKWARD}
"""Names of Megatron's timers of a pass, with the direction of the pass."""

PICTURE = "timeline.svg"
MAX_PICTURES = 8


class NoTraceError(ValueError):
    """Error that a run has no trace to draw; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class TraceSpan:
    """Span of time of one rank, with a name: a pass, a phase or a communication call."""

    rank: int
    name: str
    category: str
    """Name of a phase, or `communication`."""
    start_ms: float
    end_ms: float
    step: Step | None = None
    """Micro batch and virtual stage of a forward or backward pass; None for other spans."""

    @property
    def is_call(self) -> bool:
        """True for a communication call; its span lasts from its start to its result."""
        return self.category == _COMMUNICATION

    @property
    def group(self) -> str:
        """Process group of a communication call; empty for other spans."""
        return self.name.rpartition(" ")[2] if self.is_call else ""

    @property
    def milliseconds(self) -> float:
        """Duration of the span in milliseconds."""
        return self.end_ms - self.start_ms


def read_trace(folder: Path, split: Parallelism, microbatches: int) -> tuple[TraceSpan, ...]:
    """Return the spans of a run folder's trace, ordered by rank and start; empty if the trace has no events.

    Args:
        folder: The run folder.
        split: The run's parallelism, from which the order of its passes follows.
        microbatches: Micro batches per iteration.

    Raises:
        FileNotFoundError: The run left no trace.
        msgspec.DecodeError: The file is not a trace of this kit.
    """
    events = read_trace_events(folder / TRACE_FILE)
    spans = [
        TraceSpan(int(event.pid), event.name, event.cat, event.ts / 1000, event.end / 1000)
        for event in events
    ]
    numbered_spans: list[TraceSpan] = []
    for rank in sorted({span.rank for span in spans}):
        spans_of_rank = [span for span in spans if span.rank == rank]
        spans_of_rank.sort(key=lambda span: (span.start_ms, -span.end_ms))
        numbered_spans += _number_passes(spans_of_rank, _list_steps(rank, split, microbatches))
    return tuple(numbered_spans)


def _number_passes(
    spans: Sequence[TraceSpan], steps: Mapping[Pass, Sequence[Step]]
) -> Iterator[TraceSpan]:
    """Yield a rank's spans, and give each pass its step.

    The schedule knows the order of passes on the rank's stage, and the trace has their times. Passes beyond the
    schedule's last step get no step.
    """
    upcoming_steps = {direction: iter(steps[direction]) for direction in steps}
    for span in spans:
        if span.name in _PASSES:
            step = next(upcoming_steps[_PASSES[span.name]], None)
            yield replace(span, step=step)
        else:
            yield span


def _list_steps(rank: int, split: Parallelism, microbatches: int) -> dict[Pass, list[Step]]:
    """Return a rank's forward and backward steps in the order in which its schedule runs them."""
    steps_by_direction: dict[Pass, list[Step]] = {direction: [] for direction in _PASSES.values()}
    if split.pipeline == 1:
        for direction, steps in steps_by_direction.items():
            steps += [Step(direction, number) for number in range(microbatches)]
        return steps_by_direction
    timeline = simulate_schedule(
        split.executed_schedule, split.pipeline, microbatches, virtual=split.virtual_stages
    )
    stage = split.pipeline_rank(rank)
    for event in sorted(timeline.events, key=lambda event: event.start):
        if event.worker == stage and event.step.direction in steps_by_direction:
            steps_by_direction[event.step.direction].append(event.step)
    return steps_by_direction


def select_passes(pieces: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Return the spans that are whole forward or backward passes."""
    return [span for span in pieces if span.name in _PASSES]


def traced_idle_over_work(pieces: Sequence[TraceSpan]) -> dict[int, float]:
    """Return, by rank, the idle time divided by the working time.

    Idle time is counted between the first forward and the last backward pass over all ranks.
    """
    passes = select_passes(pieces)
    working_ms = defaultdict[int, float](float)
    for span in passes:
        working_ms[span.rank] += span.milliseconds
    start, end = _time_range(passes)
    return {rank: (end - start) / work - 1 for rank, work in sorted(working_ms.items()) if work}


def _time_range(pieces: Sequence[TraceSpan]) -> tuple[float, float]:
    """Return the first start and the last end of spans in milliseconds; two zeros without spans."""
    start = min((span.start_ms for span in pieces), default=0.0)
    end = max((span.end_ms for span in pieces), default=0.0)
    return start, end


@dataclass(frozen=True)
class Scene:
    """One traced iteration, ready to be drawn."""

    name: str
    title: str
    pieces: tuple[TraceSpan, ...]
    split: Parallelism
    microbatches: int
    on_gpu: bool
    """True for a run on GPUs: the trace, taken on the host, then has the times of kernel launches."""

    @cached_property
    def ideal(self) -> SimulatedSchedule:
        """Simulated schedule of the run with equal stages. Each pass takes the mean of the measured times."""
        passes = select_passes(self.pieces)
        return simulate_schedule(
            *(self.split.executed_schedule, self.split.pipeline, self.microbatches),
            virtual=self.split.virtual_stages,
            forward=self._mean_pass_ms(passes, Pass.FORWARD),
            backward=self._mean_pass_ms(passes, Pass.BACKWARD),
        )

    def _mean_pass_ms(self, passes: Sequence[TraceSpan], direction: Pass) -> float:
        """Return the mean milliseconds that a rank spends on a micro batch in one direction."""
        per_virtual_stage = mean(
            span.milliseconds for span in passes if span.step and span.step.direction is direction
        )
        return self.split.virtual_stages * per_virtual_stage


def draw_iteration(scene: Scene) -> Chart:
    """Draw a traced iteration, with a description of the picture."""
    painter = partial(_draw_panels, scene=scene)
    return draw_chart(scene.name, scene.title, describe_scene(scene), painter)


def describe_scene(scene: Scene) -> str:
    """Return a caption of the picture, with the ranks' idle times and the ideal bubble for a pipeline on CPU ranks."""
    idle = traced_idle_over_work(scene.pieces)
    text = (
        "One iteration on one time axis: numbers are micro batches, the thin lane is communication "
        "from its call to its result."
    )
    if scene.on_gpu:
        return f"{text} Times are the host's clock: kernels were launched then, and ran later."
    if scene.split.pipeline == 1 or not idle:
        return text
    idle_text = ", ".join(f"rank {rank} {fraction:.0%}" for rank, fraction in idle.items())
    bubble = mean(traced_idle_over_work(_ideal_spans(scene.ideal)).values())
    return (
        f"{text} Idle time between the first forward and the last backward, relative to working time:"
        f" {idle_text}. With equal stages and messages that take no time, the bubble of "
        f"{scene.ideal.schedule.paper_name} is {bubble:.0%} of the working time."
    )


def _ideal_spans(timeline: SimulatedSchedule) -> tuple[TraceSpan, ...]:
    """Return the passes of a simulated schedule as spans. The number of a stage is used as the rank."""
    names = {direction: name for name, direction in _PASSES.items()}
    return tuple(
        TraceSpan(
            rank=event.worker,
            name=names[event.step.direction],
            category="",
            start_ms=event.start,
            end_ms=event.end,
            step=event.step,
        )
        for event in timeline.events
    )


def _draw_panels(figure: Figure, scene: Scene) -> None:
    """Draw the measured iteration, up to MAX_RANKS ranks, and below it the ideal schedule if there is a pipeline."""
    ranks = sorted({span.rank for span in scene.pieces})[:MAX_RANKS]
    spans = [span for span in scene.pieces if span.rank in ranks]
    origin, end = _time_range(spans)
    length = end - origin
    lanes_per_panel, has_ideal = [len(ranks)], scene.split.pipeline > 1
    if has_ideal:
        # The ideal schedule is longer than the traced one if passes are missing from the trace.
        length = max(length, scene.ideal.length)
        lanes_per_panel.append(scene.split.pipeline)
    height = 0.75 + sum(0.32 + 0.42 * lanes for lanes in lanes_per_panel)
    figure.set_size_inches(_WIDTH_INCHES, height)
    ratios = {"height_ratios": lanes_per_panel}
    panels = figure.subplots(
        len(lanes_per_panel), 1, sharex=True, squeeze=False, gridspec_kw=ratios
    )[:, 0]
    rank_names = [f"rank {rank}" for rank in ranks]
    _draw_panel(panels[0], spans, origin=origin, length=length, names=rank_names)
    panels[0].set_title("measured", fontsize=9)
    if has_ideal:
        stages = [f"stage {stage}" for stage in range(scene.split.pipeline)]
        _draw_panel(panels[1], _ideal_spans(scene.ideal), origin=0.0, length=length, names=stages)
        title = f"ideal {scene.ideal.schedule.paper_name}, equal stages, free messages"
        panels[1].set_title(title, fontsize=9)
    panels[-1].set_xlabel("ms")
    _draw_legend(figure, spans)


def _draw_panel(
    axes: Axes, spans: Sequence[TraceSpan], *, origin: float, length: float, names: Sequence[str]
) -> None:
    """Draw one horizontal lane per rank into a panel.

    A lane is grey while the rank waits, and has the passes and phases in front of the grey. Communication calls are
    in a thin lane below it.

    Args:
        axes: The panel.
        spans: Spans of all ranks of the panel. Each rank has at least one span.
        origin: Time in milliseconds at which the axis starts.
        length: Length of the axis in milliseconds.
        names: Names of the ranks, in ascending order of the ranks.
    """
    lanes = {rank: lane for lane, rank in enumerate(sorted({span.rank for span in spans}))}
    passes = select_passes(spans)
    if passes:
        # The grey of waiting lies below everything, from the first to the last pass of all ranks.
        start, end = _time_range(passes)
        for lane in lanes.values():
            waiting = [(start - origin, end - start)]
            axes.broken_barh(waiting, _extent_of_lane(lane), facecolor=IDLE, linewidth=0)
    for span in spans:
        _draw_span(axes, span, lane=lanes[span.rank], origin=origin, length=length)
    for rank, lane in lanes.items():
        calls = [span for span in spans if span.is_call and span.rank == rank]
        joined_calls = _join_calls(calls, gap=_JOINED_GAP_FRACTION * length)
        bars = [(start - origin, end - start) for start, end in joined_calls]
        below_lane = (lane + _LANE_HEIGHT / 2 + _CALL_DISTANCE, _CALL_HEIGHT)
        axes.broken_barh(bars, below_lane, facecolor=_CALL_COLOUR, linewidth=0)
    axes.set_yticks(range(len(lanes)), list(names))
    # The first lane is at the top.
    axes.set_ylim(len(lanes) - 0.45, -0.45)
    axes.set_xlim(0, length)
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _extent_of_lane(lane: int) -> tuple[float, float]:
    """Return the lower edge and the height of a lane's bars on the vertical axis."""
    return lane - _LANE_HEIGHT / 2, _LANE_HEIGHT


def _draw_span(axes: Axes, span: TraceSpan, *, lane: int, origin: float, length: float) -> None:
    """Draw a pass with its number, or a phase. Spans of other kinds are not drawn."""
    start, width = span.start_ms - origin, span.milliseconds
    extent = _extent_of_lane(lane)
    if span.step is None:
        colour = _PHASE_COLOURS.get(span.category)
        if colour is not None:
            axes.broken_barh([(start, width)], extent, facecolor=colour, linewidth=0)
        return
    even_colour, odd_colour = FORWARD if span.step.direction is Pass.FORWARD else BACKWARD
    is_odd_chunk = span.step.chunk % 2 == 1
    colour = odd_colour if is_odd_chunk else even_colour
    axes.broken_barh([(start, width)], extent, facecolor=colour, linewidth=0.4, edgecolor="white")
    if width <= _MIN_LABELLED_FRACTION * length:
        return
    number = axes.text(
        start + width / 2,
        lane,
        str(span.step.microbatch + 1),
        color="black" if is_odd_chunk else "white",
        ha="center",
        va="center",
        fontsize=8,
        clip_on=True,
    )
    number.set_in_layout(False)


def _join_calls(calls: Sequence[TraceSpan], gap: float) -> list[tuple[float, float]]:
    """Return start and end of calls in milliseconds. Calls less than `gap` milliseconds apart become one span.

    A run has hundreds of calls per iteration, which would not be distinguishable in the picture.
    """
    spans: list[tuple[float, float]] = []
    for call in sorted(calls, key=lambda span: span.start_ms):
        if spans and call.start_ms - spans[-1][1] < gap:
            spans[-1] = (spans[-1][0], max(spans[-1][1], call.end_ms))
        else:
            spans.append((call.start_ms, call.end_ms))
    return spans


def _draw_legend(figure: Figure, spans: Sequence[TraceSpan]) -> None:
    """Draw the colours' meanings above the panels."""
    from matplotlib.patches import Patch

    colours = {"forward": FORWARD[0], "backward": BACKWARD[0]}
    if any(span.step and span.step.chunk for span in spans):
        colours |= {"forward, 2nd part": FORWARD[1], "backward, 2nd part": BACKWARD[1]}
    colours |= {phase.replace("_", " "): colour for phase, colour in _PHASE_COLOURS.items()}
    colours |= {"communication": _CALL_COLOUR, "idle": IDLE}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    look: dict[str, Any] = {"fontsize": 8, "handlelength": 1, "columnspacing": 1}
    figure.legend(handles=handles, loc="outside upper left", ncols=8, labelcolor=INK, **look)


def draw_timelines(entries: Sequence[Entry]) -> list[Chart]:
    """Return a picture for each row whose newest run has a usable trace, at most MAX_PICTURES."""
    charts: list[Chart] = []
    for entry in entries:
        if len(charts) < MAX_PICTURES and (entry.run.path / TRACE_FILE).is_file():
            with suppress(NoTraceError):
                scene = build_scene(entry.run, f"timeline-{len(charts) + 1}", entry.label)
                charts.append(draw_iteration(scene))
    return charts


def build_scene(run: Run, name: str = "timeline", label: str = "") -> Scene:
    """Read a run's trace and return the iteration to draw.

    Args:
        run: The run.
        name: Name of the picture, as of its file.
        label: Name of the run's row in the title; empty takes its strategy.

    Raises:
        NoTraceError: The run left no usable trace, or its split or micro batch is not known.
    """
    spec = run.spec
    if spec is None:
        reason = "does not record how it was split, so its passes cannot be placed"
        raise NoTraceError(f"{run.name} {reason}.")
    if not spec.microbatches:
        raise NoTraceError(f"{run.name} does not record its micro batch, so passes have no number.")
    try:
        spans = read_trace(run.path, spec.parallelism, spec.microbatches)
    except FileNotFoundError:
        raise NoTraceError(
            f"{run.name} has no {TRACE_FILE}; train at least 5 iterations with the ledger on."
        ) from None
    except (OSError, ValueError) as error:
        raise NoTraceError(f"{run.name}: {TRACE_FILE} cannot be used ({error}).") from None
    # Megatron also calls collectives in groups of one rank, which move nothing, so they are left out.
    groups_of_one = _find_groups_of_one(run)
    spans = tuple(span for span in spans if not (span.is_call and span.group in groups_of_one))
    if not spans:
        raise NoTraceError(f"{run.name} traced nothing; train at least 5 iterations.")
    title = f"Iteration of {label or run.strategy}, {run.model}"
    return Scene(
        name, title, spans, spec.parallelism, spec.microbatches, on_gpu=run.device != "cpu"
    )


def _find_groups_of_one(run: Run) -> set[str]:
    """Return the names of groups in which a rank called collectives alone; empty without a communication log."""
    record = run.measurements.communication
    groups: set[str] = set()
    for rank in record.ranks if record else ():
        groups.update(call.group for call in rank.calls if call.ranks == 1)
    return groups


def write_timeline(run: Run) -> tuple[Path, str]:
    """Draw a run's traced iteration into its folder; return the picture's path and its description.

    Raises:
        NoTraceError: The run left no usable trace, or its split or micro batch is not known.
    """
    chart, path = draw_iteration(build_scene(run)), run.path / PICTURE
    path.write_text(chart.svg)
    return path, chart.text


def trace_run(wanted: str | None, root: Path, console: Console) -> int:
    """Draw the traced iteration of a run and print the paths of picture and trace.

    Args:
        wanted: A run folder or a target such as `pp2-gpt2-tiny-2cpu`; None takes the newest run.
        root: Folder of all runs.
        console: Console to print to.

    Returns:
        0, or 1 if there is no such run or it has no usable trace.
    """
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
    """Load the run in a folder, the newest run of a target such as `pp2-gpt2-tiny-2cpu`, or the newest of all runs.

    `wanted` names the folder or the target; None stands for all runs.

    Raises:
        NoTraceError: There is no such run.
    """
    if wanted and Path(wanted).is_dir():
        return load_folder(Path(wanted))
    folders = find_run_folders(root)
    of_target = ""
    if wanted:
        target = wanted.removeprefix("train-").removeprefix("trace-")
        folders = [folder for folder in folders if folder.name.endswith(f"-{target}")]
        of_target = f"of {target} "
    if not folders:
        raise NoTraceError(
            f"There is no run {of_target}in {root}; make trace-<strategy>-<model>-<N>cpu trains one."
        )
    return load_folder(folders[-1])
