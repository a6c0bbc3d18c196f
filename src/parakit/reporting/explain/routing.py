"""What a run's routers did, over all its ranks: shares of experts, losses, and the work of each rank.

In sentences, tables and a picture: experts × iterations, and the router's losses below.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class IterationRouting:
    """One iteration, all layers and ranks."""

    iteration: int
    tokens: dict[int, tuple[int, ...]]
    """Copies of tokens that each expert computed, by layer."""
    dropped: int
    load_balancing_loss: float | None
    z_loss: float | None
    entropy_nats: float | None
    """Means over layers and tokens; None where no router reported it."""

    @property
    def computed(self) -> int:
        """Copies of tokens that were computed, over all layers."""
        return sum(map(sum, self.tokens.values()))


@dataclass(frozen=True)
class RankLoad:
    """What one rank's experts do in a mean iteration."""

    rank: int
    experts: range
    tokens: float
    """Copies of tokens, over the rank's layers."""
    ratio_to_mean: float
    """Over the mean of the ranks that exchange tokens with it."""
    wait_seconds: float | None
    """Spent waiting in calls that exchange tokens; None without a communication ledger."""


def merge_routing_of_ranks(record: RoutingRecord) -> tuple[IterationRouting, ...]:
    """Sum counts and average losses over the ranks, iteration by iteration."""
    rows: dict[int, list[LayerRouting]] = defaultdict(list)
    for row in (row for rank in record.ranks for row in rank.layers):
        rows[row.iteration].append(row)
    found = []
    for number, counts in count_tokens_per_expert(record).items():
        of_it = rows[number]
        tokens = dict(zip(sorted({row.layer for row in of_it}), counts, strict=True))
        columns = ([getattr(row, name) for row in of_it] for name in _MEANS)
        known = ([value for value in column if value is not None] for column in columns)
        dropped = sum(row.dropped_tokens for row in of_it)
        means = (mean(values) if values else None for values in known)
        found.append(IterationRouting(number, tokens, dropped, *means))
    return tuple(found)


_MEANS = ("load_balancing_loss", "z_loss", "entropy_nats")


def expert_token_ratios(
    iterations: Sequence[IterationRouting], layer: int
) -> list[tuple[float, ...]]:
    """Each expert's tokens of a layer over its even share, by iteration."""
    result = []
    for counts in (found.tokens[layer] for found in iterations):
        even = sum(counts) / len(counts) or 1.0
        result.append(tuple(tokens / even for tokens in counts))
    return result


def compute_rank_loads(
    record: RoutingRecord, split: Parallelism, communication: CommunicationRecord | None
) -> tuple[RankLoad, ...]:
    """Work of each rank under expert parallelism; nothing without it, where each keeps its own.

    Megatron numbers ranks by ETP first, then EP, then copies, then stages
    (`parallel_state.RankGenerator`).
    """
    if split.expert == 1:
        return ()
    inside = (Phase.FORWARD, Phase.BACKWARD)
    waits = {
        rank.rank: sum(
            call.wait_seconds
            for call in rank.calls
            if call.group in ROUTED_GROUPS and call.ranks > 1 and call.phase in inside
        )
        for rank in (communication.ranks if communication else ())
    }
    rows = (row for rank in record.ranks for row in rank.layers)
    own = max((len(row.tokens_per_expert) for row in rows), default=0) // split.expert
    work, result = _work(record, split), []
    for number in sorted(rank.rank for rank in record.ranks):
        block, within = divmod(number, split.expert * split.effective_expert_tensor)
        place = within // split.effective_expert_tensor
        # A stage may have no router.
        iterations = len({iteration for iteration, _ in work[block]}) or 1
        by_place = list(map(sum, zip(*work[block].values(), strict=True))) or [0] * split.expert
        even = sum(by_place) / split.expert
        ratio_to_mean = by_place[place] / even if even else 1.0
        held, tokens = range(place * own, (place + 1) * own), by_place[place] / iterations
        result.append(RankLoad(number, held, tokens, ratio_to_mean, waits.get(number)))
    return tuple(result)


def busiest_rank_ratio(record: RoutingRecord, split: Parallelism) -> float:
    """Work of the busiest rank in each layer over the mean rank's, in all: the others wait for it.

    A rank that is busiest in one layer and idle in the next is even on the whole, and still waited for.
    """
    tokens = [each for found in _work(record, split).values() for each in found.values()]
    even = sum(map(sum, tokens)) / split.expert
    return sum(map(max, tokens)) / even if even else 1.0


def _work(record: RoutingRecord, split: Parallelism) -> dict[int, dict[tuple[int, int], list[int]]]:
    """Tokens of each place's experts, by block of ranks that exchange them, iteration and layer."""
    work: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(dict)
    for rank in record.ranks:
        found = work[rank.rank // (split.expert * split.effective_expert_tensor)]
        for row in rank.layers:
            own = len(row.tokens_per_expert) // split.expert
            by_place = found.setdefault((row.iteration, row.layer), [0] * split.expert)
            for place in range(split.expert):
                by_place[place] += sum(row.tokens_per_expert[place * own : (place + 1) * own])
    return work


_figure = known("{:.3f}")
_LAST = 10
"""Iterations at the end whose mean is shown."""


def routing_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """Of a run whose routers were watched their choice, and its cost."""
    record = subject.run.measurements.routing
    if record and (iterations := merge_routing_of_ranks(record)):
        yield f"{subject.label}: {_choice(iterations)}"
        if ranks := _loads(subject, record):
            busy = busiest_rank_ratio(record, subject.split)
            yield f"{subject.label}: {_cost(subject, ranks, busy)}"


def _choice(iterations: Sequence[IterationRouting]) -> str:
    first, last = iterations[0], iterations[-1]
    late = iterations[-_LAST:]
    by_layer = {layer: _late_shares(late, layer) for layer in last.tokens}
    layer = max(by_layer, key=lambda number: max(by_layer[number]))
    top, experts = max(by_layer[layer]), len(by_layer[layer])
    dropped = sum(found.dropped for found in iterations)
    copies = sum(found.computed for found in iterations) + dropped
    lost = f"{count(dropped)} of {count(copies)} copies of tokens were dropped"
    return (
        f"in the last {len(late)} iterations the busiest of {experts} experts computed ×{top:.2f} its "
        f"even share (expert {by_layer[layer].index(top)} of layer {layer}); the load-balancing loss "
        f"went from {_figure(first.load_balancing_loss)} to {_figure(last.load_balancing_loss)} (1 is "
        f"even), the router's entropy from {_figure(first.entropy_nats)} to "
        f"{_figure(last.entropy_nats)} of at most {math.log(experts):.3f} nats; "
        f"{lost if dropped else 'no token was dropped'}."
    )


def _late_shares(late: Sequence[IterationRouting], layer: int) -> list[float]:
    return [mean(column) for column in zip(*expert_token_ratios(late, layer), strict=True)]


def _cost(subject: Subject, ranks: Sequence[RankLoad], most: float) -> str:
    works = [load.ratio_to_mean for load in ranks]
    text = (
        f"the ranks' experts compute ×{min(works):.3f} to ×{max(works):.3f} of the mean on the whole; "
        f"the busiest of each layer, which the others wait for, ×{most:.3f}"
    )
    waits = {load.rank: load.wait_seconds for load in ranks if load.wait_seconds is not None}
    times = subject.evidence.times
    whole = mean(rank.iteration_seconds for rank in times.ranks) if times and times.ranks else 0.0
    if len(waits) < 2 or not whole:
        return f"{text}; what they wait for one another is not known without a ledger."
    low, high = min(waits, key=waits.__getitem__), max(waits, key=waits.__getitem__)
    extra = waits[high] - waits[low]
    return (
        f"{text}. In exchanging tokens rank {low} waits for {milliseconds(waits[low])} and rank "
        f"{high} for {milliseconds(waits[high])} of an iteration of {milliseconds(whole)}: waiting"
        f" for another's experts cost at least the difference, {milliseconds(extra)}"
        f" ({percent(extra / whole)}), and at most all of it, "
        f"{percent(waits[high] / whole)}; the rest is the exchange itself."
    )


def routing_tables(subjects: Sequence[Subject]) -> tuple[TextTable, ...]:
    """The tables behind the sentences, those that have a line."""
    experts: list[tuple[str, ...]] = []
    ranks: list[tuple[str, ...]] = []
    losses: list[tuple[str, ...]] = []
    for subject in subjects:
        record = subject.run.measurements.routing
        iterations = merge_routing_of_ranks(record) if record else ()
        if not record or not iterations:
            continue
        late = iterations[-_LAST:]
        for layer in late[0].tokens:
            each = _late_shares(late, layer)
            tokens = count(round(mean(sum(found.tokens[layer]) for found in late)))
            top = max(range(len(each)), key=each.__getitem__)
            text = " ".join(f"{share:.2f}" for share in each)
            experts.append((subject.label, str(layer), tokens, text, f"{top}: ×{each[top]:.2f}"))
        for load in _loads(subject, record):
            wait = DASH if load.wait_seconds is None else milliseconds(load.wait_seconds)
            first, last = load.experts[0], load.experts[-1]
            held = f"{first}–{last}" if len(load.experts) > 1 else str(first)
            work = count(round(load.tokens)), f"×{load.ratio_to_mean:.3f}"
            ranks.append((subject.label, str(load.rank), held, *work, wait))
        for place in sorted({0, len(iterations) // 2, len(iterations) - 1}):
            now = iterations[place]
            figures = map(_figure, (now.load_balancing_loss, now.z_loss, now.entropy_nats))
            lost = percent(now.dropped / ((now.computed + now.dropped) or 1))
            losses.append((subject.label, str(now.iteration), *figures, lost))
    return tuple(
        TextTable(name, title, ("Strategy", *header), tuple(lines))
        for (name, title, header), lines in zip(_TABLES, (experts, ranks, losses), strict=True)
        if lines
    )


_TABLES = (
    (
        "routing-experts",
        f"Tokens of each expert over its even share, mean of the last {_LAST} iterations",
        ("Layer", "Tokens × top-k", "Experts, from 0", "Busiest"),
    ),
    (
        "routing-ranks",
        "Tokens of each rank's experts, and its wait in exchanging them",
        ("Rank", "Experts", "Tokens × top-k an iteration", "Of the mean", "Wait an iteration"),
    ),
    (
        "routing-losses",
        "The routers' losses before their coefficients",
        ("Iteration", "Load balancing", "z", "Entropy, nats", "Dropped"),
    ),
)


def _loads(subject: Subject, record: RoutingRecord) -> tuple[RankLoad, ...]:
    scale = subject.evidence.scale
    return tuple(
        replace(load, wait_seconds=load.wait_seconds and scale * load.wait_seconds)
        for load in compute_rank_loads(
            record, subject.split, subject.run.measurements.communication
        )
    )


MAX_LAYERS = 4
_HIGHEST = 2.0
"""Shares from here on have one colour."""


def draw_routing(figure: Figure, iterations: Sequence[IterationRouting]) -> None:
    """Fill a figure: a heat map for each of up to four layers, and the losses over time."""
    from matplotlib.colors import TwoSlopeNorm

    layers = choose_layers(tuple(iterations[0].tokens))
    figure.set_size_inches(WIDTH_INCHES, 1.15 * len(layers) + 2.0)
    # Constrained layout does not see that the curves' labels reach further left than the maps'.
    figure.set_layout_engine("constrained", rect=(0.03, 0, 0.97, 1))
    places = figure.add_gridspec(
        len(layers) + 1, len(_MEANS), height_ratios=[*(1.0 for _ in layers), 1.3]
    )
    maps = [figure.add_subplot(places[row, :]) for row in range(len(layers))]
    first, last = iterations[0].iteration, iterations[-1].iteration
    half = (last - first) / max(1, len(iterations) - 1) / 2 or 0.5
    for axes, layer in zip(maps, layers, strict=True):
        by_expert = list(zip(*expert_token_ratios(iterations, layer), strict=True))
        picture = axes.imshow(
            by_expert,
            aspect="auto",
            interpolation="nearest",
            cmap="PuOr_r",
            norm=TwoSlopeNorm(1.0, 0.0, _HIGHEST),
            extent=(first - half, last + half, len(by_expert) - 0.5, -0.5),
        )
        axes.set_ylabel(f"layer {layer}\nexpert", fontsize=8)
        axes.set_yticks([0, len(by_expert) - 1])
        axes.tick_params(labelsize=8, length=0, labelbottom=axes is maps[-1])
    bar = figure.colorbar(picture, ax=maps, extend="max", pad=0.02)
    bar.set_label("tokens over even share", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    names = ("load-balancing loss (1 is even)", "z-loss", "entropy, nats")
    for column, (name, field) in enumerate(zip(names, _MEANS, strict=True)):
        axes = figure.add_subplot(places[len(layers), column])
        values = [(found.iteration, getattr(found, field)) for found in iterations]
        known = [(iteration, value) for iteration, value in values if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=entry_colour(0), linewidth=1.2)
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("iteration", fontsize=8)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.tick_params(labelsize=8)
        add_grid(axes)


def choose_layers(layers: Sequence[int]) -> list[int]:
    """All, or of many the first, the last and some between."""
    if len(layers) <= MAX_LAYERS:
        return list(layers)
    places = [round(k * (len(layers) - 1) / (MAX_LAYERS - 1)) for k in range(MAX_LAYERS)]
    return [layers[place] for place in places]
