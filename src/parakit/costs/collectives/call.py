"""Equal collective calls of one rank, and the bytes that they send.

Operations, phases and bytes are defined as in the communication logs (`parakit.costs.operations`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from parakit.config.groups import Group, group_size
from parakit.config.run import RunSpec, Transport
from parakit.costs.operations import Operation, Phase, wire_bytes


class MegatronVersion(StrEnum):
    """The Megatron-LM versions whose calls are known."""

    F4FA7D6B = "f4fa7d6b"
    """Main of 2025-09-01, 0.15.0rc2: the published runs."""
    V0_19 = "core_v0.19.0"


LATEST_MEGATRON = MegatronVersion.V0_19


class CollectiveCall(NamedTuple):
    """Calls of one rank in one iteration that have the same group, operation, purpose and size."""

    group: Group
    ranks: int
    operation: Operation
    phase: Phase
    description: str
    """What is moved, in a few words."""
    calls: int
    payload_bytes: int
    """Bytes of one call's full tensor: gathered, before scattering, or as sent."""
    source: str
    """Upstream file and function, or paper."""
    overlappable: bool = False
    """True if Megatron starts the call concurrently with computation that does not wait for it."""
    transport: Transport = Transport.NCCL

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends over all these calls."""
        sent = wire_bytes(self.operation, self.payload_bytes, self.ranks, self.transport)
        return self.calls * sent

    @property
    def total_payload_bytes(self) -> int:
        """Payload bytes over all these calls."""
        return self.calls * self.payload_bytes


def collective(
    spec: RunSpec,
    group: Group,
    operation: Operation,
    phase: Phase,
    description: str,
    calls: int,
    payload_bytes: int,
    source: str,
    *,
    overlappable: bool = False,
) -> CollectiveCall:
    """Return an entry for `calls` equal calls over a group of the run.

    The group's size and the transport (NCCL or gloo) are taken from the run.
    """
    return CollectiveCall(
        group,
        group_size(spec.parallelism, group),
        operation,
        phase,
        description,
        calls,
        payload_bytes,
        source,
        overlappable,
        spec.transport,
    )


def layer_passes(spec: RunSpec, *modules: str) -> tuple[int, int]:
    """Return the numbers of forward and of backward passes on one rank per iteration.

    One pass is one layer with one micro batch. Forward passes include those that backward repeats because it
    recomputes any of `modules`. Without modules, only full recomputation counts.
    """
    layers = spec.layers_per_stage
    again = layers if spec.recompute.recomputes(*modules) else 0
    if spec.recompute.is_block_method:
        again = sum(spec.recompute.layers_per_checkpoint(layers))
    return (layers + again) * spec.microbatches, layers * spec.microbatches


def sum_bytes_by_group(calls: Iterable[CollectiveCall]) -> dict[Group, int]:
    """Return the sent bytes by group."""
    totals: dict[Group, int] = {}
    for call in calls:
        totals[call.group] = totals.get(call.group, 0) + call.wire_bytes
    return totals


def total_wire_bytes(calls: Iterable[CollectiveCall]) -> int:
    """Return the sent bytes over all groups."""
    return sum(call.wire_bytes for call in calls)
