"""Measurements of a run's ranks, as files in its folder: communication, memory, time and expert routing.

Each file is a `RanksRecord` with one entry per measured rank. This module does not import torch.
"""

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
"""Groups over which tokens are sent to experts and back. A router decides how many tokens."""


@dataclass(frozen=True)
class CallSummary:
    """Equal communication calls of one rank in one steady iteration, with their number."""

    group: str
    """Name of the group: `tp`, `cp`, `dp`, `dp_cp`, `pp`, …; torch's description of an unknown group."""
    ranks: int
    operation: Operation
    phase: Phase
    dtype: str
    calls: int
    payload_bytes: int
    """Bytes per call; the mean over the calls if a router decides (`ROUTED_GROUPS`)."""
    wire_bytes: int
    """Bytes that this rank sends in all these calls with `algorithm`."""
    algorithm: str
    wait_seconds: float
    """Seconds per iteration that the rank waited in these calls and for their results."""
    transfer_seconds: float
    """Seconds per iteration from issuing the calls to their results, overlapped computation included."""

    def wire_bytes_over(self, transport: Transport) -> int:
        """Return the bytes that the rank would send in these calls with another library."""
        if self.operation is Operation.ALL_TO_ALL:
            # Both libraries send each split directly to its peer.
            return self.wire_bytes
        bytes_per_call = wire_bytes(self.operation, self.payload_bytes, self.ranks, transport)
        return self.calls * bytes_per_call


@dataclass(frozen=True)
class RankCommunication:
    """One rank's part of `comm.json`."""

    rank: int
    steady_iterations: int
    """Number of iterations that made exactly these calls."""
    other_iterations: int
    """Number of iterations that made other calls: the first one, and those with evaluation or checkpoint."""
    calls: tuple[CallSummary, ...]
    """Calls of one steady iteration."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends per steady iteration."""
        return sum(call.wire_bytes for call in self.calls)

    def wire_bytes_over(self, transport: Transport) -> int:
        """Return the bytes that the rank would send per steady iteration with another library."""
        return sum(call.wire_bytes_over(transport) for call in self.calls)


@dataclass(frozen=True)
class RankTime:
    """One rank's part of `time.json`: mean seconds of a steady iteration."""

    rank: int
    iteration_seconds: float
    phase_seconds: dict[Phase, float]
    """Seconds by phase, which add up to the iteration."""
    communication_seconds: dict[Phase, float]
    """Seconds of each phase spent in communication calls and in waiting for them: exposed communication."""
    processor_seconds: tuple[float, ...] = ()
    """Processor time of the training thread in each steady iteration.

    On a busy machine an iteration takes longer, but hardly more processor time."""


class MemoryCategory(StrEnum):
    """Purpose of allocated memory."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    """Tensors stored for backward."""
    LOGITS = "logits"
    """Tensors with a column per entry of the rank's vocabulary, stored for backward or not."""
    COMMUNICATION = "communication"
    """Buffers that receive other ranks' data, until autograd stores them for backward."""
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that a GPU's allocator and driver report at the end of the measured iteration."""

    allocated_peak_bytes: int
    """Peak of allocated blocks since the start; the allocator rounds up the size of each block."""
    reserved_peak_bytes: int
    """Peak of memory that the allocator took from the device: allocated blocks and slack."""
    used_bytes: int
    """Used memory of the device, by all processes, with contexts and libraries."""

    @property
    def slack_bytes(self) -> int:
        """Reserved memory that is in no allocated block, at the peaks."""
        return self.reserved_peak_bytes - self.allocated_peak_bytes


@dataclass(frozen=True)
class RankMemory:
    """One rank's part of `memory.json`, of one warm-up iteration."""

    rank: int
    iteration: int
    peak_bytes: int
    peak_phase: Phase
    peak_module: str
    """Innermost module that was computing at the peak; empty if none was."""
    categories: dict[MemoryCategory, int]
    """Bytes by purpose at the peak, which add up to the peak."""
    activations_by_layer: dict[str, int]
    """Bytes stored for backward by the layer that stored them, summed over the micro batches."""
    phase_peak_bytes: dict[Phase, int]
    device: DeviceMemory | None = None
    """None if the rank computes on the host."""


@dataclass(frozen=True)
class LayerRouting:
    """Routing of one layer in one iteration, over the tokens of all micro batches of one rank.

    In every strategy the ranks route different tokens, so counts can be added over ranks. All ranks have the
    same number of tokens, so the mean of their means is the mean over all tokens. A number that is not finite
    is stored as None.
    """

    iteration: int
    """Number of the iteration, from 1."""
    layer: int
    """Number of the layer in the full model, from 1: Megatron's `layer_number`."""
    tokens_per_expert: tuple[int, ...]
    """Copies of tokens that each expert computes. If none is dropped, they add up to tokens × top-k."""
    dropped_tokens: int
    """Copies of tokens that exceeded the capacity of their expert and were dropped."""
    load_balancing_loss: float | None
    """Load-balancing loss before its coefficient, mean over micro batches; None if training has none.

    It is 1 if the load is balanced (arXiv:2101.03961, equation 4)."""
    z_loss: float | None
    """Mean squared log-sum-exp of the logits, before its coefficient (arXiv:2202.08906, equation 5)."""
    entropy_nats: float | None
    """Mean entropy of softmax(logits) per token, from 0 (certain) to ln(experts) (all experts equal)."""


@dataclass(frozen=True)
class RankRouting:
    """One rank's part of `routing.json`."""

    rank: int
    layers: tuple[LayerRouting, ...]
    """Routing by iteration, then layer. Long runs keep only every n-th iteration."""


@dataclass(frozen=True)
class RanksRecord[Rank]:
    """A file of measurements in a run folder: one entry per measured rank, in order."""

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
"""Tokens per expert, for each layer."""


def count_tokens_per_expert(record: RoutingRecord) -> dict[int, TokenCounts]:
    """Return the number of tokens of each expert, as one tuple per layer, by iteration and summed over ranks."""
    sums: dict[int, dict[int, list[int]]] = {}
    for rank in record.ranks:
        for routing in rank.layers:
            sums_by_layer = sums.setdefault(routing.iteration, {})
            counts = sums_by_layer.setdefault(routing.layer, [0] * len(routing.tokens_per_expert))
            for expert, num_tokens in enumerate(routing.tokens_per_expert):
                counts[expert] += num_tokens
    counts_by_iteration: dict[int, TokenCounts] = {}
    for iteration, sums_by_layer in sorted(sums.items()):
        layers = sorted(sums_by_layer)
        counts_by_iteration[iteration] = tuple(tuple(sums_by_layer[layer]) for layer in layers)
    return counts_by_iteration


MAX_FRACTION_MOVED_BY_ROUNDING = 0.01
"""Largest fraction of an iteration's choices that rounding in fp32 can change at once.

Rounding decides if two experts' scores agree to about 1e-6, which was counted in one of 4,096 choices."""


def find_routing_divergence(
    first: Mapping[int, TokenCounts], second: Mapping[int, TokenCounts], dtype: str
) -> int | None:
    """Return the first iteration in which the experts' numbers of tokens differ between two runs by rounding.

    If the scores of two experts are almost equal, rounding decides which expert a token gets. From the returned
    iteration on the two runs train differently, so their losses can be compared only up to this iteration. In
    16 bits it happens more often, between scores that agree to about 1e-2. Only iterations that both runs
    recorded are compared.

    None means that all numbers of tokens are equal, or that the difference is too large for rounding. In fp32,
    it is too large if more than MAX_FRACTION_MOVED_BY_ROUNDING of the tokens have another expert in the first
    iteration that differs. The runs then differ for another reason, and all their losses must be compared to
    show it.
    """
    for iteration in sorted(first.keys() & second.keys()):
        if first[iteration] == second[iteration]:
            continue
        limit = MAX_FRACTION_MOVED_BY_ROUNDING if dtype == "fp32" else 1.0
        fraction = _fraction_of_moved_tokens(first[iteration], second[iteration])
        return iteration if fraction <= limit else None
    return None


def _fraction_of_moved_tokens(first: TokenCounts, second: TokenCounts) -> float:
    """Return the fraction of tokens that went to another expert in the second run, over all layers."""
    num_tokens = num_differences = 0
    for first_layer, second_layer in zip(first, second, strict=True):
        for first_count, second_count in zip(first_layer, second_layer, strict=True):
            num_tokens += first_count
            num_differences += abs(first_count - second_count)
    # A moved token is missing for one expert and additional for another.
    return num_differences / 2 / max(1, num_tokens)


def read_measurements[T](folder: Path, kind: type[T]) -> T:
    """Read the measurements of one kind from a run folder, such as `comm.json`.

    Raises:
        FileNotFoundError: The run has no such file: it was not measured, or its model has no router.
            msgspec.DecodeError: The file is not JSON, or not a record of `kind`.
    """
    return msgspec.json.decode((folder / _FILES[kind]).read_bytes(), type=kind)
