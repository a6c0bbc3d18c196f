"""What a run's routers did, over all its ranks: shares of experts, losses, and the work of each rank.

In sentences, tables and a picture: experts × iterations, and the router's losses below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tools.records.measurements import (
    ROUTED_GROUPS,
    CommunicationRecord,
    LayerRouting,
    Phase,
    RoutingRecord,
)
from tools.report.analyse.time_shares import mean
from tools.report.canvas import WIDTH_INCHES, colour, grid
from tools.report.explain.predicted import Subject
from tools.spec.strategy import Parallelism
from tools.text.table import TextTable
from tools.text.units import DASH, count, milliseconds, percent

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
    of_mean: float
    """Over the mean of the ranks that exchange tokens with it."""
    wait_seconds: float | None
    """Spent waiting in calls that exchange tokens; None without a communication ledger."""


def iterations_of(record: RoutingRecord) -> tuple[IterationRouting, ...]:
    """Sum counts and average losses over the ranks, iteration by iteration."""
    rows: dict[int, list[LayerRouting]] = {}
    for rank in record.ranks:
        for row in rank.layers:
            rows.setdefault(row.iteration, []).append(row)
    found = []
    for number, of_it in sorted(rows.items()):
        tokens: dict[int, tuple[int, ...]] = {}
        for row in of_it:
            before = tokens.get(row.layer, (0,) * len(row.tokens_per_expert))
            tokens[row.layer] = tuple(map(sum, zip(before, row.tokens_per_expert, strict=True)))
        columns = ([getattr(row, name) for row in of_it] for name in _MEANS)
        known = ([value for value in column if value is not None] for column in columns)
        dropped = sum(row.dropped_tokens for row in of_it)
        means = (mean(values) if values else None for values in known)
        found.append(IterationRouting(number, dict(sorted(tokens.items())), dropped, *means))
    return tuple(found)


_MEANS = ("load_balancing_loss", "z_loss", "entropy_nats")


def shares(
    iterations: Sequence[IterationRouting], layer: int | None = None
) -> list[tuple[float, ...]]:
    """Each expert's tokens over its even share, by iteration; of one layer or of all together."""
    result = []
    for found in iterations:
        counts = [found.tokens[layer]] if layer is not None else list(found.tokens.values())
        totals = [sum(expert) for expert in zip(*counts, strict=True)]
        even = sum(totals) / len(totals) or 1.0
        result.append(tuple(total / even for total in totals))
    return result


def loads(
    record: RoutingRecord, split: Parallelism, communication: CommunicationRecord | None
) -> tuple[RankLoad, ...]:
    """Work of each rank under expert parallelism; nothing without it, where each keeps its own.

    Megatron numbers ranks by ETP first, then EP, then copies, then stages
    (`parallel_state.RankGenerator`).
    """
    experts = len(record.ranks[0].layers[0].tokens_per_expert) if record.ranks else 0
    if split.expert == 1 or not experts:
        return ()
    # Copies that a rank's own tokens send to each expert in a mean iteration.
    routed: dict[int, list[float]] = {}
    for each in record.ranks:
        count_of = len({row.iteration for row in each.layers}) or 1
        sums = [sum(row.tokens_per_expert[e] for row in each.layers) for e in range(experts)]
        routed[each.rank] = [tokens / count_of for tokens in sums]
    inside = (Phase.FORWARD, Phase.BACKWARD)
    waits = {
        rank.rank: sum(
            call.wait_seconds
            for call in rank.calls
            if call.group in ROUTED_GROUPS and call.ranks > 1 and call.phase in inside
        )
        for rank in (communication.ranks if communication else ())
    }
    own, block = experts // split.expert, split.expert * split.tensor_of_experts
    result = []
    for number in sorted(routed):
        first = number // block * block
        members = [routed[r] for r in range(first, first + block) if r in routed]
        place = (number - first) // split.tensor_of_experts
        held = range(place * own, (place + 1) * own)
        tokens = sum(member[expert] for member in members for expert in held)
        even = sum(map(sum, members)) / split.expert
        of_mean = tokens / even if even else 1.0
        result.append(RankLoad(number, held, tokens, of_mean, waits.get(number)))
    return tuple(result)


def busiest(record: RoutingRecord, split: Parallelism) -> float:
    """Work of the busiest rank in each layer over the mean rank's, in all: the others wait for it.

    A rank that is busiest in one layer and idle in the next is even on the whole, and still waited for.
    """
    tokens: dict[tuple[int, int, int], list[int]] = {}
    for rank in record.ranks:
        block = rank.rank // (split.expert * split.tensor_of_experts)
        for row in rank.layers:
            own = len(row.tokens_per_expert) // split.expert
            by_place = tokens.setdefault((row.iteration, row.layer, block), [0] * split.expert)
            for place in range(split.expert):
                by_place[place] += sum(row.tokens_per_expert[place * own : (place + 1) * own])
    even = sum(map(sum, tokens.values())) / split.expert
    return sum(map(max, tokens.values())) / even if even else 1.0


_LAST = 10
"""Iterations at the end whose mean is shown."""


def routing_sentences(subjects: Sequence[Subject]) -> list[str]:
    """Two sentences on every run whose routers were watched: their choice, and its cost."""
    found = []
    for subject in subjects:
        if iterations := _iterations(subject):
            found.append(f"{subject.label}: {_choice(iterations)}")
            if ranks := _loads(subject):
                found.append(f"{subject.label}: {_cost(subject, ranks)}")
    return found


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
    return [mean(column) for column in zip(*shares(late, layer), strict=True)]


def _cost(subject: Subject, ranks: Sequence[RankLoad]) -> str:
    works = [load.of_mean for load in ranks]
    record = subject.run.ledgers.routing
    most = busiest(record, subject.split) if record else 1.0
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
        iterations = _iterations(subject)
        late = iterations[-_LAST:]
        for layer in late[0].tokens if late else ():
            each = _late_shares(late, layer)
            tokens = count(round(mean(sum(found.tokens[layer]) for found in late)))
            top = max(range(len(each)), key=each.__getitem__)
            text = " ".join(f"{share:.2f}" for share in each)
            experts.append((subject.label, str(layer), tokens, text, f"{top}: ×{each[top]:.2f}"))
        for load in _loads(subject):
            wait = DASH if load.wait_seconds is None else milliseconds(load.wait_seconds)
            first, last = load.experts[0], load.experts[-1]
            held = f"{first}–{last}" if len(load.experts) > 1 else str(first)
            work = count(round(load.tokens)), f"×{load.of_mean:.3f}"
            ranks.append((subject.label, str(load.rank), held, *work, wait))
        for place in sorted({0, len(iterations) // 2, len(iterations) - 1}) if iterations else ():
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


def _iterations(subject: Subject) -> tuple[IterationRouting, ...]:
    record = subject.run.ledgers.routing
    return iterations_of(record) if record else ()


def _loads(subject: Subject) -> tuple[RankLoad, ...]:
    record, scale = subject.run.ledgers.routing, subject.evidence.scale
    found = loads(record, subject.split, subject.run.ledgers.communication) if record else ()
    return tuple(
        replace(load, wait_seconds=load.wait_seconds and scale * load.wait_seconds)
        for load in found
    )


def _figure(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


MAX_LAYERS = 4
_HIGHEST = 2.0
"""Shares from here on have one colour."""


def draw_routing(figure: Figure, iterations: Sequence[IterationRouting]) -> None:
    """Fill a figure: a heat map for each of up to four layers, and the losses over time."""
    from matplotlib.colors import TwoSlopeNorm

    layers = chosen_layers(tuple(iterations[0].tokens))
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
        by_expert = list(zip(*shares(iterations, layer), strict=True))
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
            axes.plot(*zip(*known, strict=True), color=colour(0), linewidth=1.2)
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("iteration", fontsize=8)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.tick_params(labelsize=8)
        grid(axes)


def chosen_layers(layers: Sequence[int]) -> list[int]:
    """All, or of many the first, the last and some between."""
    if len(layers) <= MAX_LAYERS:
        return list(layers)
    places = [round(k * (len(layers) - 1) / (MAX_LAYERS - 1)) for k in range(MAX_LAYERS)]
    return [layers[place] for place in places]
