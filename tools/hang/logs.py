"""What NCCL's watchdog says in a log of ranks: which call of which group did not end in time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.hang.dumps import operation_of
from tools.hang.evidence import RecordedCall

_TIMEOUT = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?"
    r"(?:\[PG ID \d+ PG GUID (?P<guid>[^\s(]*)(?:\((?P<description>[^)]*)\))? Rank (?P<place>\d+)\]"
    r"|\[Rank (?P<alone>\d+)\]).*?Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+), NumelIn=(?P<elements>\d+)"
)


def watchdog_calls(lines: Iterator[str]) -> Iterator[tuple[int, RecordedCall, str]]:
    """The rank, the call it timed out in, and the line's own words.

    A line without torchrun's prefix of the rank is of no use where it counts ranks within a group.
    """
    for line in lines:
        if "Watchdog caught" not in line or (found := _TIMEOUT.search(line)) is None:
            continue
        is_world = found["description"] in (None, "default_pg")
        rank = found["rank"] or found["alone"] or (found["place"] if is_world else None)
        if rank is None:
            continue
        call = RecordedCall(
            found["guid"] or "0",
            found["description"] or "default_pg",
            operation_of(found["operation"]),
            int(found["number"]),
            ((int(found["elements"]),),),
            (),
            0,
            False,
            False,
            False,
            None,
            (),
        )
        yield int(rank), call, line[line.index("Watchdog caught") :].strip()
