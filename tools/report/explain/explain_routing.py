"""How evenly tokens are routed, and what unevenness costs: sentences and tables from `routing.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from tools.report.explain.explain_tables import Table
from tools.report.explain.explained import Subject
from tools.report.explain.routing import (
    IterationRouting,
    RankLoad,
    busiest,
    iterations_of,
    loads,
    shares,
)
from tools.report.explain.time_shares import mean
from tools.text.units import DASH, count, milliseconds, percent

_LAST = 10
"""Iterations at the end whose mean is shown."""


def routing_sentences(subjects: Sequence[Subject]) -> list[str]:
    """Two sentences on every run whose routers were watched: their choice, and its cost."""
    return [sentence for subject in subjects for sentence in _sentences(subject)]


def routing_tables(subjects: Sequence[Subject]) -> tuple[Table, ...]:
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
) -> Table:
    own = tuple((subject.label, *line) for subject in subjects for line in lines(subject))
    return Table(name, title, ("Strategy", *header), own)


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
    times = subject.findings.times
    whole = mean(rank.iteration_seconds for rank in times.ranks) if times and times.ranks else 0.0
    if len(waits) < 2 or not whole:
        return f"{text}; what they wait for one another is not known without a ledger."
    low, high = min(waits, key=waits.__getitem__), max(waits, key=waits.__getitem__)
    extra = waits[high] - waits[low]
    least = f"{milliseconds(extra)} ({percent(extra / whole)})"
    return (
        f"{text}. In exchanging tokens rank {low} stands still for {milliseconds(waits[low])} and rank "
        f"{high} for {milliseconds(waits[high])} of an iteration of {milliseconds(whole)}: waiting for "
        f"another's experts cost at least the difference, {least}, and at most all of it, "
        f"{percent(waits[high] / whole)}; the rest is the exchange itself."
    )


def _iterations(subject: Subject) -> tuple[IterationRouting, ...]:
    record = subject.run.ledgers.routing
    return iterations_of(record) if record else ()


def _loads(subject: Subject) -> tuple[RankLoad, ...]:
    record = subject.run.ledgers.routing
    return loads(record, subject.split, subject.run.ledgers.communication) if record else ()


def _figure(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"
