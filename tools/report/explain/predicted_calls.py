"""The calls that a rank made beside those that the closed forms name, and what neither explains."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tools.plan.communication import communication_of_rank
from tools.plan.megatron import Megatron
from tools.plan.wire import Traffic
from tools.records.measurements import Calls, Operation, RankCommunication
from tools.report.explain.closed_form import pipeline_rank
from tools.spec.groups import Group
from tools.spec.run import RunSpec

_SILENT = (Operation.RECEIVE, Operation.BARRIER)
"""They send nothing; a receive is its sender's call."""

_ROUTED = (Group.EXPERT.value, Group.EXPERT_TENSOR.value)
"""How many tokens these calls move is the router's choice; the closed form has the mean."""

Kind = tuple[str, str, int]
"""Group, operation, payload bytes; payload is 0 where it depends on the router."""


@dataclass(frozen=True)
class CallRow:
    """All calls of one group and operation in an iteration."""

    group: str
    operation: str
    what: str
    """What the closed form says is moved; empty if it names no such call."""
    measured_calls: int
    predicted_calls: int
    measured_wire_bytes: int
    predicted_wire_bytes: int

    @property
    def residual_wire_bytes(self) -> int:
        """Measured minus predicted."""
        return self.measured_wire_bytes - self.predicted_wire_bytes


@dataclass(frozen=True)
class Unattributed:
    """Calls on one side only."""

    group: str
    operation: str
    payload_bytes: int
    calls: int
    """Positive: made, and in no closed form. Negative: predicted, and not made."""


@dataclass(frozen=True)
class CallComparison:
    """One rank."""

    rank: int
    rows: tuple[CallRow, ...]
    unattributed: tuple[Unattributed, ...]

    @property
    def measured_wire_bytes(self) -> int:
        """Sent in an iteration."""
        return sum(row.measured_wire_bytes for row in self.rows)

    @property
    def predicted_wire_bytes(self) -> int:
        """Sent in an iteration, in closed form."""
        return sum(row.predicted_wire_bytes for row in self.rows)


def compare_calls(
    configuration: RunSpec, rank: RankCommunication, megatron: Megatron
) -> CallComparison:
    """Hold a rank's steady iteration against the closed form, call by call."""
    stage = pipeline_rank(configuration, rank.rank)
    predicted = communication_of_rank(configuration, stage, megatron)
    measured = [c for c in rank.calls if c.ranks > 1 and c.operation not in _SILENT]
    return CallComparison(
        rank.rank, tuple(_rows(measured, predicted)), tuple(_left_over(measured, predicted))
    )


def _rows(measured: Iterable[Calls], predicted: Iterable[Traffic]) -> list[CallRow]:
    made, named = defaultdict(list), defaultdict(list)
    for call in measured:
        made[call.group, call.operation.value].append(call)
    for item in predicted:
        named[item.group.value, item.operation.value].append(item)
    return [
        CallRow(
            group=group,
            operation=operation,
            what="; ".join(dict.fromkeys(i.what for i in named[group, operation])),
            measured_calls=sum(call.calls for call in made[group, operation]),
            predicted_calls=sum(item.calls for item in named[group, operation]),
            measured_wire_bytes=sum(call.wire_bytes for call in made[group, operation]),
            predicted_wire_bytes=sum(item.wire_bytes for item in named[group, operation]),
        )
        for group, operation in sorted({*made, *named})
    ]


def _left_over(measured: Iterable[Calls], predicted: Iterable[Traffic]) -> list[Unattributed]:
    found: Counter[Kind] = Counter()
    for call in measured:
        found[_kind(call.group, call.operation.value, call.payload_bytes)] += call.calls
    for item in predicted:
        found[_kind(item.group.value, item.operation.value, item.payload_bytes)] -= item.calls
    return [Unattributed(*kind, calls) for kind, calls in sorted(found.items()) if calls]


def _kind(group: str, operation: str, payload_bytes: int) -> Kind:
    return group, operation, 0 if group in _ROUTED else payload_bytes
