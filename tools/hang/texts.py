"""What a rank says as text: its Python stacks, and NCCL's watchdog in a log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from tools.hang.dumps import operation_of
from tools.hang.evidence import Frame, RecordedCall

_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY = re.compile(r"^\s+(?P<function>\S+) \((?P<file>.+?):(?P<line>\d+)\)")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
_TIMEOUT = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?"
    r"(?:\[PG ID \d+ PG GUID (?P<guid>[^\s(]*)(?:\((?P<description>[^)]*)\))? Rank (?P<place>\d+)\]"
    r"|\[Rank (?P<alone>\d+)\]).*?Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+), NumelIn=(?P<elements>\d+)"
)


def is_stacks(text: str) -> bool:
    """Whether a text is a stack: faulthandler's or py-spy's."""
    return "most recent call first" in text or bool(
        re.search(r"^Thread \S+ \((?:active|idle)", text, re.MULTILINE)
    )


def read_stacks(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first; empty if there is none.

    faulthandler writes the main thread last, py-spy (text or JSON) calls it MainThread.
    """
    threads: list[tuple[str, list[Frame]]] = []
    if text[:1] == "[":
        for one in json.loads(text):
            frames = [Frame(f["name"], f["filename"], int(f["line"])) for f in one["frames"]]
            threads.append((str(one.get("thread_name")), frames))
    else:
        for line in text.splitlines():
            if _THREAD.match(line):
                threads.append((line, []))
            elif threads and (found := _FAULTHANDLER.match(line) or _PY_SPY.match(line)):
                threads[-1][1].append(Frame(found["function"], found["file"], int(found["line"])))
        threads = [one for one in threads if one[1]]
    named = (frames for title, frames in threads if "MainThread" in title)
    return tuple(next(named, threads[-1][1] if threads else ()))


def watchdog_calls(lines: Iterable[str]) -> Iterator[tuple[int, RecordedCall, str]]:
    """The rank, the call it timed out in, and the line's own words.

    A line without torchrun's prefix of the rank is of no use where it counts ranks within a group.
    """
    for line in lines:
        if "Watchdog caught" not in line or (found := _TIMEOUT.search(line)) is None:
            continue
        description = found["description"] or "default_pg"
        in_world = found["place"] if description == "default_pg" else None
        if (rank := found["rank"] or found["alone"] or in_world) is None:
            continue
        call = RecordedCall(
            group=found["guid"] or "0",
            description=description,
            operation=operation_of(found["operation"]),
            number=int(found["number"]),
            sizes=((int(found["elements"]),),),
        )
        yield int(rank), call, line[line.index("Watchdog caught") :].strip()
