"""What a run's routers did, over all its ranks: shares of experts, losses, and the work of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tools.records.measurements import ROUTED_GROUPS, CommunicationRecord, Phase
from tools.records.routing import LayerRouting, RoutingRecord
from tools.report.explain.time_shares import mean
from tools.spec.strategy import Parallelism


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
    """Means over layers and tokens; None where no router told."""

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
    """It stands still in calls that exchange tokens; None without a communication ledger."""


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
    """Work of the busiest rank in each layer over the mean rank's, in all: everybody waits for it.

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
