"""What the ledgers of a run's ranks leave in its folder: communication, memory, time, routing. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.run import COMMUNICATION_FILE, MEMORY_FILE, ROUTING_FILE, TIME_FILE
from parakit.config.run import Transport
from parakit.costs import Operation, Phase, wire_bytes

ROUTED_GROUPS = ("ep", "expert_tp", "tp_ep")
"""Groups over which tokens are sent to experts and back; a router decides how many."""


@dataclass(frozen=True)
class CallSummary:
    """Equal calls of one rank in one steady iteration."""

    group: str
    """`tp`, `cp`, `dp`, `dp_cp`, `pp`, …; of an unknown group, its own description."""
    ranks: int
    operation: Operation
    phase: Phase
    dtype: str
    calls: int
    payload_bytes: int
    """Of one call; the mean of its calls where a router decides (`ROUTED_GROUPS`)."""
    wire_bytes: int
    """Sent by this rank over all these calls, for the algorithm."""
    algorithm: str
    wait_seconds: float
    """Seconds that the rank waited, in the call and for its result; mean of an iteration."""
    transfer_seconds: float
    """From issuing a call to having its result; more than the wait where computation overlapped."""

    def wire_bytes_over(self, transport: Transport) -> int:
        """What the same calls would send over another library."""
        if self.operation is Operation.ALL_TO_ALL:  # Pairwise in both, and its splits decide.
            return self.wire_bytes
        each = wire_bytes(self.operation, self.payload_bytes, self.ranks, transport)
        return self.calls * each


@dataclass(frozen=True)
class RankCommunication:
    """One rank's part of `comm.json`."""

    rank: int
    steady_iterations: int
    """Iterations that made exactly these calls; all the following figures are of one such."""
    other_iterations: int
    """Those that made other calls: the first, evaluations, checkpoints."""
    calls: tuple[CallSummary, ...]

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends in an iteration."""
        return sum(item.wire_bytes for item in self.calls)

    def wire_bytes_over(self, transport: Transport) -> int:
        """What it would send over another library."""
        return sum(item.wire_bytes_over(transport) for item in self.calls)


@dataclass(frozen=True)
class RankTime:
    """One rank's part of `time.json`: mean seconds of a steady iteration."""

    rank: int
    iteration_seconds: float
    phase_seconds: dict[Phase, float]
    """Sums to the iteration."""
    communication_seconds: dict[Phase, float]
    """Of those, spent in calls and in waiting for them: exposed communication."""
    processor_seconds: tuple[float, ...] = ()
    """Of the thread that trains, in each steady iteration: on a machine with other work its iterations
    take longer, and hardly more of the processor."""


class MemoryCategory(StrEnum):
    """What live bytes are for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    """Kept for backward."""
    LOGITS = "logits"
    """Tensors with a column for each word of the rank's vocabulary, kept or not."""
    COMMUNICATION = "communication"
    """Buffers that receive other ranks' bytes, until autograd keeps them."""
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class DeviceMemory:
    """Readings of a GPU's allocator and driver at the end of the measured iteration."""

    allocated_peak_bytes: int
    """Live blocks, each rounded up, at their most since the start."""
    reserved_peak_bytes: int
    """Taken from the device at the most since the start: live blocks and the allocator's slack."""
    used_bytes: int
    """Of the whole device, by all that runs on it: context and libraries too."""

    @property
    def slack_bytes(self) -> int:
        """Reserved, but in no live block."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


@dataclass(frozen=True)
class RankMemory:
    """One rank's part of `memory.json`, of one warm-up iteration."""

    rank: int
    iteration: int
    peak_bytes: int
    peak_phase: Phase
    peak_module: str
    """The innermost module that was computing at the peak; empty between modules."""
    categories: dict[MemoryCategory, int]
    """At the peak; sums to it."""
    activations_by_layer: dict[str, int]
    """Bytes kept for backward, summed over the iteration's micro batches, by who saved them."""
    phase_peak_bytes: dict[Phase, int]
    device: DeviceMemory | None = None
    """None where the rank computes on the host."""


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
class RanksRecord[Rank]:
    """A ledger in a run's folder: the ranks that were watched, in order."""

    ranks: tuple[Rank, ...]
    schema: int = 1


CommunicationRecord = RanksRecord[RankCommunication]
TimeRecord = RanksRecord[RankTime]
MemoryRecord = RanksRecord[RankMemory]
RoutingRecord = RanksRecord[RankRouting]
_FILES: dict[Any, str] = {
    CommunicationRecord: COMMUNICATION_FILE,
    MemoryRecord: MEMORY_FILE,
    TimeRecord: TIME_FILE,
    RoutingRecord: ROUTING_FILE,
}

TokenCounts = tuple[tuple[int, ...], ...]
"""Tokens of each expert, layer by layer."""


def count_tokens_per_expert(record: RoutingRecord) -> dict[int, TokenCounts]:
    """Tokens of each expert by iteration and layer, summed over ranks."""
    sums: dict[tuple[int, int], tuple[int, ...]] = {}
    for row in (row for rank in record.ranks for row in rank.layers):
        place, new = (row.iteration, row.layer), row.tokens_per_expert
        before = sums.get(place, (0,) * len(new))
        sums[place] = tuple(a + b for a, b in zip(before, new, strict=True))
    iterations = sorted({iteration for iteration, _ in sums})
    return {i: tuple(sums[at] for at in sorted(sums) if at[0] == i) for i in iterations}


MAX_FRACTION_MOVED_BY_ROUNDING = 0.01
"""Share of an iteration's choices that fp32's rounding can move at once: it decides where two experts'
scores agree to some 1e-6 of themselves, in one of 4,096 choices where it was counted."""


def find_routing_divergence(
    one: Mapping[int, TokenCounts], two: Mapping[int, TokenCounts], dtype: str
) -> int | None:
    """The first iteration in which rounding gave an expert another number of tokens.

    Where the scores of two experts are almost equal rounding decides, and from then on two runs train
    differently: their losses can be compared only up to here. None if no choice is another, or more
    than `MOVED_BY_ROUNDING` of them in fp32 are at once: that has another cause, which the losses are to
    show. In 16 bits rounding decides more often, between scores that agree to some 1e-2 of themselves.
    """
    most = MAX_FRACTION_MOVED_BY_ROUNDING if dtype == "fp32" else 1.0
    common = sorted(one.keys() & two.keys())
    first = next((i for i in common if one[i] != two[i]), None)
    return first if first is None or _moved(one[first], two[first]) <= most else None


def _moved(one: TokenCounts, two: TokenCounts) -> float:
    """Share of the choices that are another's."""
    pairs = [(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / 2 / max(1, sum(a for a, _ in pairs))


def read_measurements[T](folder: Path, kind: type[T]) -> T:
    """Read the ledger of a kind, such as `comm.json`.

    Raises:
        FileNotFoundError: The run has none: it ran without ledger, or its model has no router.
        msgspec.DecodeError: The file is not JSON of this shape.
    """
    return msgspec.json.decode((folder / _FILES[kind]).read_bytes(), type=kind)
