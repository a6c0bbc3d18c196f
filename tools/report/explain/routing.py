"""What a run's routers did, over all its ranks: shares of experts, losses, and the work of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tools.records.measurements import (
    ROUTED_GROUPS,
    CommunicationRecord,
    LayerRouting,
    Phase,
    RoutingRecord,
)
from tools.report.analyse.time_shares import mean
from tools.report.explain.subjects import Subject
from tools.spec.strategy import Parallelism
from tools.text.table import TextTable
from tools.text.units import DASH, count, milliseconds, percent


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
    return tuple(_iteration(number, rows[number]) for number in sorted(rows))


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
    routed = {rank.rank: _routed(rank.layers, experts) for rank in record.ranks}
    waits = _waits(communication) if communication else {}
    own, block = experts // split.expert, split.expert * split.tensor_of_experts
    result = []
    for rank in sorted(routed):
        first = rank // block * block
        members = [routed[r] for r in range(first, first + block) if r in routed]
        place = (rank - first) // split.tensor_of_experts
        held = range(place * own, (place + 1) * own)
        tokens = sum(member[expert] for member in members for expert in held)
        even = sum(map(sum, members)) / split.expert
        result.append(RankLoad(rank, held, tokens, tokens / even if even else 1.0, waits.get(rank)))
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


def _iteration(number: int, rows: Sequence[LayerRouting]) -> IterationRouting:
    tokens: dict[int, tuple[int, ...]] = {}
    for row in rows:
        before = tokens.get(row.layer, (0,) * len(row.tokens_per_expert))
        tokens[row.layer] = tuple(map(sum, zip(before, row.tokens_per_expert, strict=True)))
    return IterationRouting(
        iteration=number,
        tokens=dict(sorted(tokens.items())),
        dropped=sum(row.dropped_tokens for row in rows),
        load_balancing_loss=_mean_of(rows, lambda row: row.load_balancing_loss),
        z_loss=_mean_of(rows, lambda row: row.z_loss),
        entropy_nats=_mean_of(rows, lambda row: row.entropy_nats),
    )


def _mean_of(
    rows: Iterable[LayerRouting], figure: Callable[[LayerRouting], float | None]
) -> float | None:
    known = [value for row in rows if (value := figure(row)) is not None]
    return mean(known) if known else None


def _routed(rows: Sequence[LayerRouting], experts: int) -> list[float]:
    """Copies that a rank's own tokens send to each expert in a mean iteration."""
    iterations = len({row.iteration for row in rows}) or 1
    return [sum(row.tokens_per_expert[e] for row in rows) / iterations for e in range(experts)]


def _waits(communication: CommunicationRecord) -> dict[int, float]:
    inside = (Phase.FORWARD, Phase.BACKWARD)
    return {
        rank.rank: sum(
            call.wait_seconds
            for call in rank.calls
            if call.group in ROUTED_GROUPS and call.ranks > 1 and call.phase in inside
        )
        for rank in communication.ranks
    }


_LAST = 10
"""Iterations at the end whose mean is shown."""


def routing_sentences(subjects: Sequence[Subject]) -> list[str]:
    """Two sentences on every run whose routers were watched: their choice, and its cost."""
    return [sentence for subject in subjects for sentence in _sentences(subject)]


def routing_tables(subjects: Sequence[Subject]) -> tuple[TextTable, ...]:
    """The tables behind the sentences, those that have a line."""
    found = (
        _table(
            "routing-experts",
            f"Tokens of each expert over its even share, mean of the last {_LAST} iterations",
            ("Layer", "Tokens × top-k", "Experts, from 0", "Busiest"),
            subjects,
            _expert_lines,
        ),
        _table(
            "routing-ranks",
            "Tokens of each rank's experts, and its wait in exchanging them",
            ("Rank", "Experts", "Tokens × top-k an iteration", "Of the mean", "Wait an iteration"),
            subjects,
            _load_lines,
        ),
        _table(
            "routing-losses",
            "The routers' losses before their coefficients",
            ("Iteration", "Load balancing", "z", "Entropy, nats", "Dropped"),
            subjects,
            _loss_lines,
        ),
    )
    return tuple(table for table in found if table.lines)


def _table(
    name: str,
    title: str,
    header: tuple[str, ...],
    subjects: Sequence[Subject],
    lines: Callable[[Subject], Iterable[tuple[str, ...]]],
) -> TextTable:
    own = tuple((subject.label, *line) for subject in subjects for line in lines(subject))
    return TextTable(name, title, ("Strategy", *header), own)


def _expert_lines(subject: Subject) -> Iterator[tuple[str, ...]]:
    iterations = _iterations(subject)[-_LAST:]
    for layer in iterations[0].tokens if iterations else ():
        late = [mean(column) for column in zip(*shares(iterations, layer), strict=True)]
        tokens = mean(sum(found.tokens[layer]) for found in iterations)
        busiest = max(range(len(late)), key=late.__getitem__)
        yield (
            str(layer),
            count(round(tokens)),
            " ".join(f"{share:.2f}" for share in late),
            f"{busiest}: ×{late[busiest]:.2f}",
        )


def _load_lines(subject: Subject) -> Iterator[tuple[str, ...]]:
    for load in _loads(subject):
        wait = DASH if load.wait_seconds is None else milliseconds(load.wait_seconds)
        held = f"{load.experts[0]}–{load.experts[-1]}" if len(load.experts) > 1 else load.experts[0]
        yield str(load.rank), str(held), count(round(load.tokens)), f"×{load.of_mean:.3f}", wait


def _loss_lines(subject: Subject) -> Iterator[tuple[str, ...]]:
    found = _iterations(subject)
    for place in sorted({0, len(found) // 2, len(found) - 1}) if found else ():
        now = found[place]
        yield (
            str(now.iteration),
            _figure(now.load_balancing_loss),
            _figure(now.z_loss),
            _figure(now.entropy_nats),
            percent(now.dropped / ((now.computed + now.dropped) or 1)),
        )


def _sentences(subject: Subject) -> Iterator[str]:
    iterations = _iterations(subject)
    if not iterations:
        return
    yield f"{subject.label}: {_choice(iterations)}"
    ranks = _loads(subject)
    if ranks:
        yield f"{subject.label}: {_cost(subject, ranks)}"


def _choice(iterations: Sequence[IterationRouting]) -> str:
    first, last = iterations[0], iterations[-1]
    late = iterations[-_LAST:]
    by_layer = {
        layer: [mean(column) for column in zip(*shares(late, layer), strict=True)]
        for layer in last.tokens
    }
    layer = max(by_layer, key=lambda number: max(by_layer[number]))
    top = max(by_layer[layer])
    experts = len(by_layer[layer])
    dropped = sum(found.dropped for found in iterations)
    copies = sum(found.computed for found in iterations) + dropped
    lost = (
        f"{count(dropped)} of {count(copies)} copies of tokens were dropped"
        if dropped
        else ("no token was dropped")
    )
    return (
        f"in the last {len(late)} iterations the busiest of {experts} experts computed ×{top:.2f} its "
        f"even share (expert {by_layer[layer].index(top)} of layer {layer}); the load-balancing loss "
        f"went from {_figure(first.load_balancing_loss)} to {_figure(last.load_balancing_loss)} (1 is "
        f"even), the router's entropy from {_figure(first.entropy_nats)} to "
        f"{_figure(last.entropy_nats)} of at most {math.log(experts):.3f} nats; {lost}."
    )


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
    least = f"{milliseconds(extra)} ({percent(extra / whole)})"
    return (
        f"{text}. In exchanging tokens rank {low} waits for {milliseconds(waits[low])} and rank "
        f"{high} for {milliseconds(waits[high])} of an iteration of {milliseconds(whole)}: waiting for "
        f"another's experts cost at least the difference, {least}, and at most all of it, "
        f"{percent(waits[high] / whole)}; the rest is the exchange itself."
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
