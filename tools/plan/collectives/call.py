"""Calls of one rank, by group, and what they put on the wire.

Operations, phases and the bytes an algorithm sends are those of the ledgers (`tools.measurements`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tools.records.measurements import Operation, Phase, wire_bytes
from tools.spec.groups import Group
from tools.spec.run import Transport


@dataclass(frozen=True, slots=True)
class CollectiveCall:
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
    transport: Transport = Transport.NCCL

    @property
    def wire_bytes(self) -> int:
        """Sent by this rank over all these calls."""
        return self.wire_bytes_over(self.transport)

    def wire_bytes_over(self, transport: Transport) -> int:
        """Sent if that library moves it."""
        return self.calls * wire_bytes(self.operation, self.payload_bytes, self.ranks, transport)

    @property
    def total_payload_bytes(self) -> int:
        """Payload over all these calls."""
        return self.calls * self.payload_bytes


def by_group(traffic: Iterable[CollectiveCall]) -> dict[Group, int]:
    """Wire bytes by group."""
    totals: dict[Group, int] = {}
    for item in traffic:
        totals[item.group] = totals.get(item.group, 0) + item.wire_bytes
    return totals


def total_wire_bytes(traffic: Iterable[CollectiveCall]) -> int:
    """Wire bytes over all groups."""
    return sum(item.wire_bytes for item in traffic)


class Megatron(StrEnum):
    """A version of Megatron-LM, by what it is checked out as."""

    F4FA7D6B = "f4fa7d6b"
    """Main of 2025-09-01, 0.15.0rc2: the published runs."""
    V0_19 = "core_v0.19.0"


LATEST = Megatron.V0_19
