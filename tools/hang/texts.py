"""What a rank says as text: its Python stacks, and NCCL's watchdog in a log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tools.hang.dumps import operation_of
from tools.hang.evidence import Frame, Progress, RecordedCall

_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY = re.compile(r"^\s+(?P<function>\S+) \((?P<file>.+?):(?P<line>\d+)\)")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
_TIMEOUT = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?"
    r"(?:\[PG ID \d+ PG GUID (?P<guid>[^\s(]*)(?:\((?P<description>[^)]*)\))? Rank (?P<place>\d+)\]"
    r"|\[Rank (?P<alone>\d+)\]).*?Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+), NumelIn=(?P<elements>\d+)"
)


_DETECTED = re.compile(
    r"\[rank(?P<rank>\d+)\]:.*?\[PG ID \d+ PG GUID (?P<guid>[^\s(]*)\((?P<description>[^)]*)\) "
    r"Rank \d+\]\s+failure detected by watchdog at work sequence id: (?P<number>\d+) PG status: "
    r"last enqueued work: (?P<entered>\d+), last completed work: (?P<completed>\d+)"
)
"""The line after a timeout; in torch 2.11 it alone has the group."""


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


class TimedOut(NamedTuple):
    """What NCCL's watchdog says of a rank."""

    rank: int
    call: RecordedCall
    progress: Progress | None
    """In the call's group."""
    words: str


def watchdog_calls(lines: Iterable[str]) -> Iterator[TimedOut]:
    """The calls that timed out, each once.

    A line without torchrun's prefix of the rank is of no use where it counts ranks within a group.
    """
    told: set[tuple[str, str | None, str]] = set()
    # Its group is in a later line; in none of an old torch, where it is taken for that of all ranks.
    unnamed: dict[tuple[str, str], re.Match[str]] = {}
    for line in lines:
        if "atchdog" not in line:
            continue
        found, group = _TIMEOUT.search(line), None
        if found and found["guid"] is None and found["rank"]:
            unnamed.setdefault((found["rank"], found["number"]), found)
            continue
        if not found and (group := _DETECTED.search(line)):
            found = unnamed.pop((group["rank"], group["number"]), None)
        if found:
            guid = (group or found)["guid"]
            key = (found["rank"] or found["alone"] or found["place"], guid, found["number"])
            if key not in told:
                told.add(key)
                yield from _timed_out(found, group)
    for found in unnamed.values():
        yield from _timed_out(found, None)


def _timed_out(found: re.Match[str], group: re.Match[str] | None) -> Iterator[TimedOut]:
    description = (group or found)["description"] or "default_pg"
    in_world = found["place"] if description == "default_pg" else None
    if (rank := found["rank"] or found["alone"] or in_world) is None:
        return
    call = RecordedCall(
        group=(group or found)["guid"] or "0",
        description=description,
        operation=operation_of(found["operation"]),
        number=int(found["number"]),
        sizes=((int(found["elements"]),),),
    )
    progress = Progress(int(group["entered"]), int(group["completed"])) if group else None
    words = found.string[found.string.index("Watchdog caught") :].strip()
    yield TimedOut(int(rank), call, progress, words)
