"""What a collective puts on the wire: bytes that one rank sends, and the algorithm that assumes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Operation(StrEnum):
    """Collectives and messages as torch.distributed knows them."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"


class Group(StrEnum):
    """Process groups, by what they split."""

    TENSOR = "tp"
    CONTEXT = "cp"
    DATA_CONTEXT = "dp_cp"
    EXPERT = "ep"
    EXPERT_DATA = "expert_dp"
    EXPERT_TENSOR = "expert_tp"
    TENSOR_EXPERT = "tp_ep"
    EXPERT_MODEL = "expert_mp"
    """Expert TP×EP×PP: the ranks that hold one copy of all experts."""
    PIPELINE = "pp"
    EMBEDDING = "embedding"
    MODEL = "mp"
    """TP×PP: the ranks of one replica."""
    WORLD = "world"


class Phase(StrEnum):
    """Part of an iteration that a call belongs to."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT_SYNC = "gradient_sync"
    OPTIMIZER = "optimizer"


ALGORITHMS = {
    Operation.ALL_REDUCE: "ring, 2(n-1)/n of the tensor",
    Operation.ALL_GATHER: "ring, (n-1)/n of the gathered tensor",
    Operation.REDUCE_SCATTER: "ring, (n-1)/n of the whole tensor",
    Operation.ALL_TO_ALL: "pairwise, (n-1)/n of the tensor",
    Operation.BROADCAST: "chain, (n-1)/n of the tensor on average over the ranks",
    Operation.SEND: "one message; its receive sends nothing",
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Equal calls of one rank in one iteration."""

    group: Group
    ranks: int
    operation: Operation
    phase: Phase
    what: str
    """What is moved, in a few words."""
    calls: int
    payload_bytes: int
    """Of one call: the whole tensor (gathered, before scattering, or as sent)."""
    source: str
    """Upstream file and function, or paper."""
    hideable: bool = False
    """Whether Megatron starts it beside arithmetic that does not wait for it."""

    @property
    def wire_bytes(self) -> int:
        """Sent by this rank over all these calls."""
        return self.calls * wire_bytes(self.operation, self.payload_bytes, self.ranks)

    @property
    def total_payload_bytes(self) -> int:
        """Payload over all these calls."""
        return self.calls * self.payload_bytes


def wire_bytes(operation: Operation, payload_bytes: int, ranks: int) -> int:
    """Bytes one rank sends for one call, rounded down; nothing in a group of one rank."""
    if ranks == 1:
        return 0
    if operation is Operation.SEND:
        return payload_bytes
    passes = 2 if operation is Operation.ALL_REDUCE else 1
    return passes * (ranks - 1) * payload_bytes // ranks


def by_group(traffic: Iterable[Traffic]) -> dict[Group, int]:
    """Wire bytes by group."""
    totals: dict[Group, int] = {}
    for item in traffic:
        totals[item.group] = totals.get(item.group, 0) + item.wire_bytes
    return totals


def total_wire_bytes(traffic: Iterable[Traffic]) -> int:
    """Wire bytes over all groups."""
    return sum(item.wire_bytes for item in traffic)
