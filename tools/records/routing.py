"""What the routers of a run decided: `routing.json`, gathered from its ranks as the ledgers are.

Beside `records` and `measurements`, and like them without torch and without any other part of the kit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.records.run import ROUTING_FILE


@dataclass(frozen=True)
class LayerRouting:
    """One layer's router in one iteration, over a rank's own tokens of all its micro batches.

    Every rank routes different tokens, whatever the parallelism, so counts add up over ranks; the
    means are over equal numbers of tokens, so their mean over ranks is that of all tokens. A figure
    that is not finite is None.
    """

    iteration: int
    """From 1."""
    layer: int
    """From 1, over the whole model: Megatron's `layer_number`."""
    tokens_per_expert: tuple[int, ...]
    """Copies of tokens that each expert computes; with nothing dropped they sum to tokens × top-k."""
    dropped_tokens: int
    """Copies that were routed to an expert and left out by its capacity."""
    load_balancing_loss: float | None
    """Before its coefficient (arXiv:2101.03961, equation 4; 1 is perfect balance), mean of the micro
    batches; None where training does without."""
    z_loss: float | None
    """Before its coefficient (arXiv:2202.08906, equation 5): mean squared log-sum-exp of the logits."""
    entropy_nats: float | None
    """Mean over tokens of the entropy of softmax(logits): ln(experts) is indifferent, 0 is certain."""


@dataclass(frozen=True)
class RankRouting:
    """One rank's part of `routing.json`."""

    rank: int
    layers: tuple[LayerRouting, ...]
    """By iteration, then layer; of long runs every n-th iteration is kept."""


@dataclass(frozen=True)
class RoutingRecord:
    """`routing.json`: the ranks whose routers were watched, in order."""

    ranks: tuple[RankRouting, ...]
    schema: int = 1


Counts = tuple[tuple[int, ...], ...]
"""Tokens of each expert, layer by layer."""


def choices(record: RoutingRecord) -> dict[int, Counts]:
    """What the routers chose in each iteration, over all ranks."""
    sums: dict[tuple[int, int], tuple[int, ...]] = {}
    for row in (row for rank in record.ranks for row in rank.layers):
        place, new = (row.iteration, row.layer), row.tokens_per_expert
        before = sums.get(place, (0,) * len(new))
        sums[place] = tuple(a + b for a, b in zip(before, new, strict=True))
    iterations = sorted({iteration for iteration, _ in sums})
    return {i: tuple(sums[at] for at in sorted(sums) if at[0] == i) for i in iterations}


def first_other_choice(one: Mapping[int, Counts], two: Mapping[int, Counts]) -> int | None:
    """The first iteration in which an expert got another number of tokens; None if there is none.

    Where two experts are all but equal rounding decides, and from then on two runs train on other
    sums: their losses say something of each other only up to here.
    """
    common = sorted(one.keys() & two.keys())
    return next((i for i in common if one[i] != two[i]), None)


def read_routing(folder: Path) -> RoutingRecord:
    """Read `routing.json`.

    Raises:
        FileNotFoundError: The run has none: its model is dense, or it ran without ledger.
        msgspec.DecodeError: The file is not JSON of this shape.
    """
    return msgspec.json.decode((folder / ROUTING_FILE).read_bytes(), type=RoutingRecord)
