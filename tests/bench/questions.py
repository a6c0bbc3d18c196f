"""Ask 120 questions with measured answers, and grade the planner, a published table and a rule of thumb.

    make bench NAME=questions

Questions are made from published measurements: which of two layouts ran faster, which of up to five was the fastest,
and whether a run fits into its devices. Our planner answers each question on times with constants that were fitted
without the question's source. Memory has no fitted constants. A tool that cannot tell two layouts apart gets the
score that guessing between them has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import zip_longest
from json import dumps
from statistics import median

from parakit.config.run import RunSpec
from parakit.costs import find_peak_rank
from parakit.costs.tensors import total_parameters
from parakit.formatting.table import markdown_rows
from parakit.formatting.units import percent
from parakit.planner.readings.published import usual_cluster
from parakit.planner.readings.residual import Residual, Residuals, compute_residuals
from parakit.planner.readings.summary import group_by_job
from parakit.planner.readings.table import read_measurements
from parakit.planner.time.cluster import Cluster
from parakit.planner.verdict import Fit, judge_fit_on_cluster
from tests.planner.test_out_of_memory import ON_GH200, RAN, build_gh200_run

QUESTIONS_PER_KIND = 40
MAX_LAYOUTS = 5
SMALLEST_DIFFERENCE = 0.05
"""Relative difference of two measured times from which a question about them has an answer."""
DRAWS_PER_JOB = 20
"""Draws of layouts from each job. Most of them have no clear answer or were drawn before."""
GH200 = "gh200"
YES, NO = "fits", "does not fit"


class Kind(StrEnum):
    """Kind of a question."""

    FASTER = "which of two layouts ran faster"
    BEST = "which of three to five layouts was the fastest"
    FITS = "does the run fit into its devices"


class Tool(StrEnum):
    """Who answers."""

    PLANNER = "parakit"
    BRIDGE = "table of Megatron-Bridge"
    RULE = "rule of thumb"
    GUESS = "guess"


@dataclass(frozen=True)
class Question:
    """Question with its measured answer, and the score of each tool."""

    kind: Kind
    source: str
    text: str
    options: tuple[str, ...]
    answer: str
    scores: Mapping[Tool, float]
    """1 for the right option, 0 for another one; with several equal choices the chance that one of them is right."""


@dataclass(frozen=True)
class MeasuredLayout:
    """Layout of a job with its measured and its predicted time."""

    spec: RunSpec
    seconds: float
    predicted_seconds: float

    @property
    def name(self) -> str:
        """Strategy, micro batch and recomputation, such as `tp2dp4, micro batch 1`."""
        return f"{self.spec.name}, micro batch {self.spec.batch.micro_batch_size}"


def collect_layouts(items: Iterable[Residual]) -> list[MeasuredLayout]:
    """Return the distinct layouts of one job, with the median of their measured times."""
    items = list(items)
    layouts = []
    for spec in dict.fromkeys(item.measured_run.spec for item in items):
        of_spec = [item for item in items if item.measured_run.spec == spec]
        seconds = median(item.published_seconds for item in of_spec)
        layouts.append(MeasuredLayout(spec, seconds, of_spec[0].seconds or math.inf))
    return layouts


def choose_smallest[T](options: Sequence[T], costs: Sequence[float]) -> list[T]:
    """Return the options with the smallest cost; several if costs are equal."""
    least = min(costs)
    return [option for option, cost in zip(options, costs, strict=True) if cost == least]


def score_choice(chosen: Sequence[object], answer: object) -> float:
    """Return the chance that a choice among the chosen options is the answer."""
    return chosen.count(answer) / len(chosen) if chosen else 0.0


BRIDGE_DENSE = (
    (1e9, (1, 1), (1, 1), 1),
    (10e9, (2, 4), (1, 1), 1),
    (70e9, (4, 8), (2, 4), 1),
    (175e9, (8, 8), (4, 8), 1),
    (math.inf, (8, 8), (8, 16), 2),
)
"""Starting points for dense models: parameters below which a row holds, range of TP, range of PP, CP.

Megatron-Bridge, docs/parallelisms.md at 067f987df, "Strategy Selection Guide"."""
BRIDGE_EXPERTS = (
    (20e9, (1, 1), (1, 1), (1, math.inf)),
    (100e9, (1, 2), (2, 4), (8, 16)),
    (500e9, (2, 4), (8, 16), (8, 32)),
    (math.inf, (2, 2), (16, 16), (32, 64)),
)
"""Typical layouts of mixtures: total parameters below which a row holds, range of TP, of PP and of EP (same page)."""
BRIDGE_CONTEXT = ((8192, (1, 1)), (32768, (2, 2)), (math.inf, (4, 8)))
"""Range of CP by tokens per sample up to which a row holds (same page)."""


def bridge_ranges(spec: RunSpec) -> dict[str, tuple[float, float]]:
    """Return the ranges of degrees that Megatron-Bridge's guide recommends for a run's model and sequence."""
    parameters = total_parameters(spec.shape)
    context = next(row for tokens, row in BRIDGE_CONTEXT if spec.shape.seq_length <= tokens)
    if spec.shape.experts:
        row = next(row for row in BRIDGE_EXPERTS if parameters < row[0])
        return {"tensor": row[1], "pipeline": row[2], "expert": row[3], "context": context}
    dense_row = next(row for row in BRIDGE_DENSE if parameters < row[0])
    lowest = max(dense_row[3], context[0])
    return {
        "tensor": dense_row[1],
        "pipeline": dense_row[2],
        "context": (lowest, max(lowest, context[1])),
    }


def bridge_distance(spec: RunSpec) -> float:
    """Return how many doublings a layout's degrees are away from the recommended ranges, added up."""
    distance = 0.0
    for name, (lowest, highest) in bridge_ranges(spec).items():
        degree = getattr(spec.parallelism, name)
        distance += _doublings(degree, lowest) + _doublings(highest, degree)
    return distance


def _doublings(start: float, end: float) -> float:
    """Return how many doublings lead from `start` up to `end`; 0 if `end` is not larger.

    `start` may be infinite: a range without an upper limit.
    """
    return math.log2(end / start) if end > start else 0.0


def model_parallel_size(spec: RunSpec) -> int:
    """Return the number of ranks over which the layers of the model and its sequences are split."""
    degrees = spec.parallelism
    return degrees.tensor * degrees.pipeline * degrees.context


def rule_of_thumb_cost(spec: RunSpec) -> tuple[float, ...]:
    """Return what the rule of thumb makes small: split as little as possible, and use large micro batches."""
    return (
        model_parallel_size(spec),
        spec.parallelism.pipeline,
        -spec.batch.micro_batch_size,
    )


def rule_of_thumb_fits(spec: RunSpec, cluster: Cluster) -> bool:
    """Return True if weights, gradients and optimizer take less than 80% of a device, at 18 bytes per parameter.

    With ZeRO-1 twelve of the bytes are split over the data-parallel ranks. Expert parallelism counts as splitting
    all weights of a mixture.
    """
    degrees = spec.parallelism
    data = degrees.data if degrees.sharding else 1
    ranks = degrees.tensor * degrees.pipeline * max(1, degrees.expert)
    bytes_per_parameter = 6 + 12 / data
    needed = total_parameters(spec.shape) / ranks * bytes_per_parameter
    return needed < 0.8 * cluster.device.memory_bytes


def score_layouts(layouts: Sequence[MeasuredLayout]) -> dict[Tool, float]:
    """Return the score of each tool for the question which of these layouts was the fastest."""
    fastest = min(layouts, key=lambda layout: layout.seconds)
    costs = {
        Tool.PLANNER: [layout.predicted_seconds for layout in layouts],
        Tool.BRIDGE: [bridge_distance(layout.spec) for layout in layouts],
        Tool.RULE: _rank_costs([rule_of_thumb_cost(layout.spec) for layout in layouts]),
        Tool.GUESS: [0.0] * len(layouts),
    }
    return {
        tool: score_choice(choose_smallest(layouts, tool_costs), fastest)
        for tool, tool_costs in costs.items()
    }


def _rank_costs(costs: Sequence[tuple[float, ...]]) -> list[float]:
    """Return the position of each cost in the order of all distinct costs."""
    order = sorted(set(costs))
    return [float(order.index(cost)) for cost in costs]


def describe_job(item: Residual) -> str:
    """Return a job in words, such as `llama3-70b on 64 H100, global batch 128, 8,192 tokens, bf16`."""
    measurement, spec = item.measurement, item.measured_run.spec
    return (
        f"{measurement.model} on {measurement.gpus} {measurement.gpu}, global batch "
        f"{spec.batch.global_batch_size}, {spec.shape.seq_length:,} tokens, {spec.dtype}"
    )


def make_time_questions(residuals: Residuals, seed: int) -> Iterator[Question]:
    """Yield questions on two layouts and on three to five layouts, drawn with a seed over all sources.

    The layouts of a question belong to one job and have different parallelism. A job with many layouts gives several
    questions, each on other layouts.
    """
    generator = random.Random(seed)
    jobs = [(items[0], collect_layouts(items)) for items in group_by_job(residuals)]
    generator.shuffle(jobs)
    for kind, sizes in ((Kind.FASTER, (2, 2)), (Kind.BEST, (3, MAX_LAYOUTS))):
        candidates: dict[frozenset[RunSpec], tuple[Residual, list[MeasuredLayout]]] = {}
        # Every job gives one question before a job gives a second one.
        for _ in range(DRAWS_PER_JOB):
            for item, layouts in jobs:
                drawn = generator.sample(layouts, min(sizes[1], len(layouts)))
                if len(drawn) >= sizes[0] and has_clear_answer(drawn):
                    candidates.setdefault(frozenset(layout.spec for layout in drawn), (item, drawn))
        for item, drawn in take_from_sources_in_turn(candidates.values()):
            yield make_layout_question(kind, item, drawn)


def has_clear_answer(layouts: Sequence[MeasuredLayout]) -> bool:
    """Return True if layouts differ in parallelism, and the fastest one is clearly ahead of all others."""
    if len({layout.spec.parallelism for layout in layouts}) < len(layouts):
        return False
    fastest, second, *_ = sorted(layout.seconds for layout in layouts)
    return second >= fastest * (1 + SMALLEST_DIFFERENCE)


def take_from_sources_in_turn[T](
    candidates: Iterable[tuple[Residual, T]],
) -> list[tuple[Residual, T]]:
    """Return QUESTIONS_PER_KIND candidates, one of each source in turn, so that no source decides the score.

    Fewer are returned if there are no more candidates.
    """
    by_source: dict[str, list[tuple[Residual, T]]] = {}
    for item, value in candidates:
        by_source.setdefault(item.measurement.source, []).append((item, value))
    chosen: list[tuple[Residual, T]] = []
    for candidates_in_turn in zip_longest(*by_source.values()):
        chosen += filter(None, candidates_in_turn)
    return chosen[:QUESTIONS_PER_KIND]


def make_layout_question(kind: Kind, item: Residual, layouts: Sequence[MeasuredLayout]) -> Question:
    """Return the question which of the layouts of a job was the fastest."""
    fastest = min(layouts, key=lambda layout: layout.seconds)
    return Question(
        kind,
        item.measurement.source,
        text=f"{describe_job(item)}: {kind}?",
        options=tuple(layout.name for layout in layouts),
        answer=fastest.name,
        scores=score_layouts(layouts),
    )


def make_memory_questions() -> Iterator[Question]:
    """Yield a question for each published run on GH200 that trained or went out of memory, at most 40."""
    for model, strategy, samples, flags, published in ON_GH200[:QUESTIONS_PER_KIND]:
        spec = build_gh200_run(model, strategy, samples, flags)
        cluster = usual_cluster(GH200, spec.parallelism.world_size)
        ran = published == RAN
        needed = {
            name: lowest
            for name, (lowest, _) in bridge_ranges(spec).items()
            if getattr(spec.parallelism, name) < lowest
        }
        fits = judge_fit_on_cluster(spec, find_peak_rank(spec)[1], cluster)
        says_yes = {
            Tool.PLANNER: fits is not Fit.DOES_NOT_FIT,
            # The guide says how far to split a model; a layout that is split less is taken not to fit.
            Tool.BRIDGE: not needed,
            Tool.RULE: rule_of_thumb_fits(spec, cluster),
        }
        scores = {tool: float(answer == ran) for tool, answer in says_yes.items()}
        yield Question(
            Kind.FITS,
            "published runs on GH200",
            text=f"{model}, {strategy}, micro batch {samples} on GH200 of 96 GB: {Kind.FITS}?",
            options=(YES, NO),
            answer=YES if ran else NO,
            scores={**scores, Tool.GUESS: 0.5},
        )


def make_questions(seed: int) -> list[Question]:
    """Return all questions of a seed, 40 of each kind."""
    residuals = compute_residuals(*read_measurements())
    return [*make_time_questions(residuals, seed), *make_memory_questions()]


def wilson_interval(score: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a fraction of `count` trials (Wilson, JASA 22, 1927)."""
    z = 1.96
    denominator = 1 + z * z / count
    center = (score + z * z / (2 * count)) / denominator
    half = z * math.sqrt(score * (1 - score) / count + z * z / (4 * count**2)) / denominator
    return max(0.0, center - half), min(1.0, center + half)


def format_scores(questions: Sequence[Question]) -> str:
    """Return a Markdown table: the fraction of right answers of each tool, per kind of question."""
    header = ["question", "questions", "sources", *map(str, Tool)]
    rows = []
    for kind in (*Kind, None):
        asked = [question for question in questions if kind in (question.kind, None)]
        cells = [str(kind or "all"), str(len(asked)), str(len({q.source for q in asked}))]
        for tool in Tool:
            score = sum(question.scores[tool] for question in asked) / len(asked)
            low, high = wilson_interval(score, len(asked))
            cells.append(f"{percent(score)} ({percent(low)} to {percent(high)})")
        rows.append(cells)
    return markdown_rows(header, rows)


def bench_questions(seed: int, json: bool) -> int:
    """Print the table of scores, or with `json` all questions of a seed as JSON; return 0."""
    questions = make_questions(seed)
    if json:
        print(dumps([asdict(question) for question in questions], indent=1))
    else:
        print(format_scores(questions))
    return 0
