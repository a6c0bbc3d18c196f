"""Calls, ranks and waits in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tools.hang.evidence import Evidence, RecordedCall
from tools.hang.waits import Wait
from tools.text.units import joined


def described(call: RecordedCall) -> str:
    """What ranks must agree on: `all_reduce of [4] Float`."""
    sizes = " and ".join(str(list(size)) for size in call.sizes) or "nothing"
    return f"{call.operation} of {sizes}{' ' + '/'.join(call.dtypes) if call.dtypes else ''}"


def who_waits(waits: Sequence[Wait]) -> str:
    """`ranks 1 and 2 wait`."""
    ranks = {wait.rank for wait in waits}
    return f"{ranks_of(ranks)} wait{'s' * (len(ranks) == 1)}"


def where_of(evidence: Evidence, wait: Wait) -> str:
    """The call in which it waits, and its group."""
    if wait.call is None:
        return "an exchange between stages"
    return f"{wait.call} of the {evidence.groups[wait.call.group].label}"


def ranks_of(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 5`: at most eight of them."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {listed(found)}"


def listed(ranks: Sequence[int]) -> str:
    """`1, 2 and 5`: at most eight of them."""
    more = [f"{len(ranks) - 8} more"] if len(ranks) > 8 else []
    return joined([*map(str, ranks[:8]), *more])
