"""Explain a run's expert routing over all its ranks: tokens per expert, router losses, work per rank.

The input is a run's `routing.json`. Token counts are copies: a token that goes to top-k experts counts k
times. Results are sentences, tables and a picture of experts × iterations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from parakit.artifacts.measurements import (
    ROUTED_GROUPS,
    CommunicationRecord,
    LayerRouting,
    RoutingRecord,
    count_tokens_per_expert,
)
from parakit.config.strategy import Parallelism
from parakit.costs import Phase
from parakit.formatting.table import TextTable
from parakit.formatting.units import DASH, count, known, milliseconds, percent
from parakit.reporting.analyse.time_shares import mean
from parakit.reporting.canvas import WIDTH_INCHES, add_grid, entry_colour
from parakit.reporting.explain.predicted import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MEANS = ("load_balancing_loss", "z_loss", "entropy_nats")
"""Fields of a layer's routing that are averaged over layers and ranks."""
_LATE_ITERATIONS = 10
"""Number of iterations at the end of the run over which sentences and tables average."""
_PASSES = (Phase.FORWARD, Phase.BACKWARD)
_figure = known("{:.3f}")


@dataclass(frozen=True)
class IterationRouting:
    """Routing of one iteration, over all layers and ranks."""

    iteration: int
    tokens: dict[int, tuple[int, ...]]
    """Copies of tokens that each expert computed, by layer."""
    dropped: int
    load_balancing_loss: float | None
    z_loss: float | None
    entropy_nats: float | None
    """Losses and entropy are means over layers and tokens; None if no router reported them."""

    @property
    def computed(self) -> int:
        """Copies of tokens that were computed, over all layers."""
        return sum(map(sum, self.tokens.values()))


@dataclass(frozen=True)
class RankLoad:
    """Work of one rank's experts per iteration, on average."""

    rank: int
    experts: range
    tokens: float
    """Copies of tokens per iteration, over the rank's layers."""
    ratio_to_mean: float
    """Tokens of this rank over the mean of the ranks that exchange tokens with it."""
    wait_seconds: float | None
    """Seconds per iteration in calls that exchange tokens; None without a communication log."""


class _BlockWork(dict[tuple[int, int], list[int]]):
    """Tokens by iteration and layer, one number per expert-parallel index.

    They are those of one block of ranks: the ranks that send tokens to one another.
    """


def merge_routing_of_ranks(record: RoutingRecord) -> tuple[IterationRouting, ...]:
    """Return the routing of each iteration, merged over the ranks.

    Token counts and dropped tokens are summed. Losses and the entropy are averaged; None if no rank recorded
    them.
    """
    rows_by_iteration: dict[int, list[LayerRouting]] = defaultdict(list)
    for rank in record.ranks:
        for row in rank.layers:
            rows_by_iteration[row.iteration].append(row)
    merged = []
    for iteration, counts in count_tokens_per_expert(record).items():
        rows = rows_by_iteration[iteration]
        layers = sorted({row.layer for row in rows})
        averages: list[float | None] = []
        for name in _MEANS:
            values = [getattr(row, name) for row in rows]
            known_values = [value for value in values if value is not None]
            averages.append(mean(known_values) if known_values else None)
        dropped = sum(row.dropped_tokens for row in rows)
        tokens = dict(zip(layers, counts, strict=True))
        merged.append(IterationRouting(iteration, tokens, dropped, *averages))
    return tuple(merged)


def expert_token_ratios(
    iterations: Sequence[IterationRouting], layer: int
) -> list[tuple[float, ...]]:
    """Return, for each iteration, every expert's token count divided by the mean count of the layer's experts."""
    ratios = []
    for iteration in iterations:
        counts = iteration.tokens[layer]
        even = sum(counts) / len(counts) or 1.0
        ratios.append(tuple(tokens / even for tokens in counts))
    return ratios


def compute_rank_loads(
    record: RoutingRecord, split: Parallelism, communication: CommunicationRecord | None
) -> tuple[RankLoad, ...]:
    """Return the work of each rank's experts; empty for a run without expert parallelism.

    The result relies on Megatron's order of ranks: expert tensor parallelism varies fastest, then expert
    parallelism, then replicas, then stages (`parallel_state.RankGenerator`).
    """
    if split.expert == 1:
        return ()
    waits = _exchange_wait_seconds(communication)
    experts_per_rank = _num_experts(record) // split.expert
    work = _tokens_by_expert_index(record, split)
    loads = []
    for number in sorted(rank.rank for rank in record.ranks):
        block, position = divmod(number, split.expert * split.effective_expert_tensor)
        expert_index = position // split.effective_expert_tensor
        first_expert = expert_index * experts_per_rank
        totals = [0] * split.expert
        for tokens_by_index in work[block].values():
            for index, tokens in enumerate(tokens_by_index):
                totals[index] += tokens
        # A pipeline stage may have no layer with experts, and then its block has no tokens.
        num_iterations = len({iteration for iteration, _ in work[block]}) or 1
        mean_total = sum(totals) / split.expert
        load = RankLoad(
            rank=number,
            experts=range(first_expert, first_expert + experts_per_rank),
            tokens=totals[expert_index] / num_iterations,
            ratio_to_mean=totals[expert_index] / mean_total if mean_total else 1.0,
            wait_seconds=waits.get(number),
        )
        loads.append(load)
    return tuple(loads)


def _exchange_wait_seconds(communication: CommunicationRecord | None) -> dict[int, float]:
    """Return, by rank, the seconds per iteration of waiting in calls that send tokens to experts.

    Only calls of forward and backward in groups of several ranks count. The result is empty without a
    communication log.
    """
    waits = {}
    for rank in communication.ranks if communication else ():
        waits[rank.rank] = sum(
            call.wait_seconds
            for call in rank.calls
            if call.group in ROUTED_GROUPS and call.ranks > 1 and call.phase in _PASSES
        )
    return waits


def _num_experts(record: RoutingRecord) -> int:
    """Return the number of experts per layer; 0 if no rank has a layer with experts."""
    rows = (row for rank in record.ranks for row in rank.layers)
    return max((len(row.tokens_per_expert) for row in rows), default=0)


def busiest_rank_ratio(record: RoutingRecord, split: Parallelism) -> float:
    """Return the tokens of each layer's busiest rank, summed over the layers, divided by those of an average rank.

    The other ranks wait for the busiest rank in every layer. So the layers are compared one by one. A rank that is
    busiest in one layer and idle in the next has an average total, and the other ranks still wait for it. The ratio is
    1 if no expert has a token.
    """
    busiest_tokens = all_tokens = 0
    for tokens_by_layer in _tokens_by_expert_index(record, split).values():
        for tokens_by_rank in tokens_by_layer.values():
            busiest_tokens += max(tokens_by_rank)
            all_tokens += sum(tokens_by_rank)
    average_tokens = all_tokens / split.expert
    return busiest_tokens / average_tokens if average_tokens else 1.0


def _tokens_by_expert_index(record: RoutingRecord, split: Parallelism) -> dict[int, _BlockWork]:
    """Return, for each block of ranks that exchange tokens with each other, the tokens of each expert-parallel index.

    The tokens are counted per iteration and layer.
    """
    work: dict[int, _BlockWork] = defaultdict(_BlockWork)
    for rank in record.ranks:
        block_work = work[rank.rank // (split.expert * split.effective_expert_tensor)]
        for row in rank.layers:
            per_rank = len(row.tokens_per_expert) // split.expert
            totals = block_work.setdefault((row.iteration, row.layer), [0] * split.expert)
            for index in range(split.expert):
                experts = row.tokens_per_expert[index * per_rank : (index + 1) * per_rank]
                totals[index] += sum(experts)
    return work


def routing_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """Yield sentences on how evenly a run's routers chose experts, and on the cost of uneven choices.

    A run without a `routing.json` yields nothing.
    """
    record = subject.run.measurements.routing
    iterations = merge_routing_of_ranks(record) if record else ()
    if not record or not iterations:
        return
    yield f"{subject.label}: {_describe_choices(iterations)}"
    loads = _scaled_loads(subject, record)
    if loads:
        ratio = busiest_rank_ratio(record, subject.split)
        yield f"{subject.label}: {_describe_load_cost(subject, loads, ratio)}"


def answer_routing(subjects: Sequence[Subject]) -> str:
    """Return a sentence on the busiest expert of all runs, and one on the cost of waiting for other ranks' experts.

    The second sentence is left out if the cost is unknown. The text is empty if no run has a `routing.json`.
    """
    busiest: Subject | None = None
    largest_ratio = -math.inf
    for subject in subjects:
        record = subject.run.measurements.routing
        iterations = merge_routing_of_ranks(record) if record else ()
        if iterations:
            ratio = _find_busiest_expert(iterations[-_LATE_ITERATIONS:]).ratio
            if ratio > largest_ratio:
                largest_ratio, busiest = ratio, subject
    record = busiest.run.measurements.routing if busiest else None
    if busiest is None or record is None:
        return ""
    text = (
        f"The busiest expert of {busiest.label} computes {largest_ratio:.2f} times its even part of the tokens,"
        " at the end of the run."
    )
    cost = _measure_wait_cost(busiest, _scaled_loads(busiest, record))
    if cost is None:
        return text
    return f"{text} Waiting for other ranks' experts costs {cost.lowest} to {cost.highest} of the iteration."


@dataclass(frozen=True)
class _BusiestExpert:
    """Expert with the most tokens relative to an even split."""

    layer: int
    expert: int
    ratio: float
    num_experts: int


def _find_busiest_expert(late: Sequence[IterationRouting]) -> _BusiestExpert:
    """Return the busiest expert of all layers, by its mean ratio over some iterations."""
    ratios_by_layer = {layer: _mean_token_ratios(late, layer) for layer in late[-1].tokens}
    layer = max(ratios_by_layer, key=lambda number: max(ratios_by_layer[number]))
    ratios = ratios_by_layer[layer]
    return _BusiestExpert(layer, ratios.index(max(ratios)), max(ratios), len(ratios))


def _describe_choices(iterations: Sequence[IterationRouting]) -> str:
    """Return a sentence on the busiest expert, the routers' losses at start and end, and the dropped tokens."""
    first, last = iterations[0], iterations[-1]
    late = iterations[-_LATE_ITERATIONS:]
    busiest = _find_busiest_expert(late)
    dropped = sum(iteration.dropped for iteration in iterations)
    copies = sum(iteration.computed for iteration in iterations) + dropped
    dropped_text = f"{count(dropped)} of {count(copies)} copies of tokens were dropped"
    return (
        f"in the last {len(late)} iterations the busiest of {busiest.num_experts} experts computed"
        f" {busiest.ratio:.2f} times its even part (expert {busiest.expert} of layer {busiest.layer})."
        f" The load-balancing loss went from {_figure(first.load_balancing_loss)} to"
        f" {_figure(last.load_balancing_loss)} (1 is even), the router's entropy from"
        f" {_figure(first.entropy_nats)} to {_figure(last.entropy_nats)} of at most"
        f" {math.log(busiest.num_experts):.3f} nats;"
        f" {dropped_text if dropped else 'no token was dropped'}."
    )


def _mean_token_ratios(late: Sequence[IterationRouting], layer: int) -> list[float]:
    """Return each expert's mean ratio to an even split over some iterations of a layer."""
    return [mean(column) for column in zip(*expert_token_ratios(late, layer), strict=True)]


@dataclass(frozen=True)
class _WaitCost:
    """Ranks with the shortest and the longest wait for tokens, and limits of what uneven work costs."""

    shortest: RankLoad
    longest: RankLoad
    iteration_seconds: float
    lowest: str
    """Difference between the two waits as a percentage of the iteration."""
    highest: str
    """Longest wait as a percentage of the iteration."""


def _measure_wait_cost(subject: Subject, loads: Sequence[RankLoad]) -> _WaitCost | None:
    """Return the cost of waiting for other ranks' experts; None if fewer than two ranks have times and waits."""
    times = subject.evidence.times
    if times is None or not times.ranks:
        return None
    iteration_seconds = mean(rank.iteration_seconds for rank in times.ranks)
    waits = [(load.wait_seconds, load) for load in loads if load.wait_seconds is not None]
    if len(waits) < 2 or not iteration_seconds:
        return None
    shortest_seconds, shortest = min(waits, key=itemgetter(0))
    longest_seconds, longest = max(waits, key=itemgetter(0))
    difference = percent((longest_seconds - shortest_seconds) / iteration_seconds)
    longest_fraction = percent(longest_seconds / iteration_seconds)
    return _WaitCost(shortest, longest, iteration_seconds, difference, longest_fraction)


def _describe_load_cost(subject: Subject, loads: Sequence[RankLoad], busiest_ratio: float) -> str:
    """Return sentences on how uneven the ranks' work is, and how long ranks wait for one another's experts."""
    ratios = [load.ratio_to_mean for load in loads]
    text = (
        f"over the run, the ranks' experts compute {min(ratios):.3f} to {max(ratios):.3f} times the"
        f" mean; the busiest rank of each layer, for which the others wait, {busiest_ratio:.3f} times"
    )
    cost = _measure_wait_cost(subject, loads)
    if cost is None:
        return f"{text}. How long they wait for one another is not known without a comm.json."
    low, high = cost.shortest.wait_seconds or 0.0, cost.longest.wait_seconds or 0.0
    return (
        f"{text}. In calls that exchange tokens, rank {cost.shortest.rank} spends {milliseconds(low)}"
        f" and rank {cost.longest.rank} {milliseconds(high)} of an iteration of"
        f" {milliseconds(cost.iteration_seconds)}. Waiting for another rank's experts costs at least the"
        f" difference, {milliseconds(high - low)} ({cost.lowest}), and at most the longer time"
        f" ({cost.highest}); the transfer itself takes the remainder."
    )


def routing_tables(subjects: Sequence[Subject]) -> tuple[TextTable, ...]:
    """Return the tables of experts, ranks and losses; tables without a line are left out."""
    expert_lines: list[tuple[str, ...]] = []
    rank_lines: list[tuple[str, ...]] = []
    loss_lines: list[tuple[str, ...]] = []
    for subject in subjects:
        record = subject.run.measurements.routing
        iterations = merge_routing_of_ranks(record) if record else ()
        if record and iterations:
            expert_lines += _expert_lines(subject, iterations[-_LATE_ITERATIONS:])
            rank_lines += [_rank_line(subject, load) for load in _scaled_loads(subject, record)]
            loss_lines += _loss_lines(subject, iterations)
    return tuple(
        TextTable(name, title, ("Strategy", *header), tuple(lines))
        for (name, title, header), lines in zip(
            _TABLES, (expert_lines, rank_lines, loss_lines), strict=True
        )
        if lines
    )


def _expert_lines(subject: Subject, late: Sequence[IterationRouting]) -> Iterator[tuple[str, ...]]:
    """Yield a line per layer: tokens per iteration, the ratio of each expert, and the busiest expert."""
    for layer in late[0].tokens:
        ratios = _mean_token_ratios(late, layer)
        tokens = round(mean(sum(iteration.tokens[layer]) for iteration in late))
        busiest = ratios.index(max(ratios))
        all_ratios = " ".join(f"{ratio:.2f}" for ratio in ratios)
        busiest_text = f"{busiest}: ×{ratios[busiest]:.2f}"
        yield subject.label, str(layer), count(tokens), all_ratios, busiest_text


def _rank_line(subject: Subject, load: RankLoad) -> tuple[str, ...]:
    """Return a rank's experts, tokens per iteration, ratio to the mean and wait per iteration."""
    wait = DASH if load.wait_seconds is None else milliseconds(load.wait_seconds)
    first, last = load.experts[0], load.experts[-1]
    experts = f"{first}–{last}" if len(load.experts) > 1 else str(first)
    tokens = count(round(load.tokens))
    return subject.label, str(load.rank), experts, tokens, f"×{load.ratio_to_mean:.3f}", wait


def _loss_lines(
    subject: Subject, iterations: Sequence[IterationRouting]
) -> Iterator[tuple[str, ...]]:
    """Yield lines with the routers' losses and dropped tokens: of the first, the middle and the last iteration."""
    for index in sorted({0, len(iterations) // 2, len(iterations) - 1}):
        iteration = iterations[index]
        figures = (iteration.load_balancing_loss, iteration.z_loss, iteration.entropy_nats)
        copies = (iteration.computed + iteration.dropped) or 1
        dropped = percent(iteration.dropped / copies)
        yield subject.label, str(iteration.iteration), *map(_figure, figures), dropped


_TABLES = (
    (
        "routing-experts",
        f"Tokens of each expert over its even part, mean of the last {_LATE_ITERATIONS} iterations",
        ("Layer", "Tokens × top-k", "Experts, from 0", "Busiest"),
    ),
    (
        "routing-ranks",
        "Tokens of each rank's experts, and its wait in exchanging them",
        ("Rank", "Experts", "Tokens × top-k per iteration", "Of the mean", "Wait per iteration"),
    ),
    (
        "routing-losses",
        "The routers' losses before their coefficients",
        ("Iteration", "Load balancing", "z", "Entropy, nats", "Dropped"),
    ),
)
"""Name, title and header of each table of routing."""


def _scaled_loads(subject: Subject, record: RoutingRecord) -> tuple[RankLoad, ...]:
    """Return the work per rank, with waits scaled to the iteration time of the report's row."""
    scale = subject.evidence.scale
    loads = compute_rank_loads(record, subject.split, subject.run.measurements.communication)
    return tuple(
        replace(load, wait_seconds=load.wait_seconds and scale * load.wait_seconds)
        for load in loads
    )


MAX_LAYERS = 4
_MAX_COLOURED_RATIO = 2.0
"""Ratio to an even split from which on all experts have one colour."""


def draw_routing(figure: Figure, iterations: Sequence[IterationRouting]) -> None:
    """Draw a heat map of experts × iterations for up to MAX_LAYERS layers, and the losses below."""
    layers = choose_layers(tuple(iterations[0].tokens))
    figure.set_size_inches(WIDTH_INCHES, 1.15 * len(layers) + 2.0)
    # Constrained layout does not see that the curves' labels reach further left than the maps'.
    figure.set_layout_engine("constrained", rect=(0.03, 0, 0.97, 1))
    cells = figure.add_gridspec(
        len(layers) + 1, len(_MEANS), height_ratios=[*(1.0 for _ in layers), 1.3]
    )
    maps = [figure.add_subplot(cells[row, :]) for row in range(len(layers))]
    _draw_heat_maps(figure, maps, layers, iterations)
    titles = ("load-balancing loss (1 is even)", "z-loss", "entropy, nats")
    for column, (title, field) in enumerate(zip(titles, _MEANS, strict=True)):
        axes = figure.add_subplot(cells[len(layers), column])
        values = [(iteration.iteration, getattr(iteration, field)) for iteration in iterations]
        points = [(number, value) for number, value in values if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=entry_colour(0), linewidth=1.2)
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("iteration", fontsize=8)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.tick_params(labelsize=8)
        add_grid(axes)


def _draw_heat_maps(
    figure: Figure,
    maps: Sequence[Axes],
    layers: Sequence[int],
    iterations: Sequence[IterationRouting],
) -> None:
    """Draw one heat map per layer with a common colour bar."""
    from matplotlib.colors import TwoSlopeNorm

    first, last = iterations[0].iteration, iterations[-1].iteration
    half_step = (last - first) / max(1, len(iterations) - 1) / 2 or 0.5
    for axes, layer in zip(maps, layers, strict=True):
        ratios_by_expert = list(zip(*expert_token_ratios(iterations, layer), strict=True))
        num_experts = len(ratios_by_expert)
        picture = axes.imshow(
            ratios_by_expert,
            aspect="auto",
            interpolation="nearest",
            cmap="PuOr_r",
            norm=TwoSlopeNorm(1.0, 0.0, _MAX_COLOURED_RATIO),
            extent=(first - half_step, last + half_step, num_experts - 0.5, -0.5),
        )
        axes.set_ylabel(f"layer {layer}\nexpert", fontsize=8)
        axes.set_yticks([0, num_experts - 1])
        axes.tick_params(labelsize=8, length=0, labelbottom=axes is maps[-1])
    bar = figure.colorbar(picture, ax=list(maps), extend="max", pad=0.02)
    bar.set_label("tokens over even part", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def choose_layers(layers: Sequence[int]) -> list[int]:
    """Return all layers, or MAX_LAYERS of them spread evenly from the first to the last."""
    if len(layers) <= MAX_LAYERS:
        return list(layers)
    step = (len(layers) - 1) / (MAX_LAYERS - 1)
    return [layers[round(index * step)] for index in range(MAX_LAYERS)]
