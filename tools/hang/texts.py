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
_GROUP = (
    r"\[PG (?:ID \d+ PG GUID )?(?P<guid>[^\s(\]]+)(?:\((?P<description>[^)]*)\))?"
    r" Rank (?P<place>\d+)\]"
)
"""As torch 2.3, 2.4 and 2.7 write it."""
_TIMEOUT = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?(?:" + _GROUP + r"|\[Rank \d+\]).*?"
    r"Watchdog caught collective operation timeout: WorkNCCL\("
    r"SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+)(?:, NumelIn=(?P<elements>\d+))?"
)
_DETECTED = re.compile(
    r"\[rank(?P<rank>\d+)\]:.*?" + _GROUP + r".*? detected by watchdog at work(?: sequence id)?: "
    r"(?P<number>\d+).*?last enqueued (?:NCCL )?work: (?P<entered>\d+), "
    r"last completed (?:NCCL )?work: (?P<completed>\d+)"
)
"""The line after a timeout; in torch 2.11 it alone has the group."""


def is_stacks(text: str) -> bool:
    """Whether a text is a stack: faulthandler's or py-spy's."""
    return "most recent call first" in text or bool(
        re.search(r"^Thread \S+ \((?:active|idle)", text, re.MULTILINE)
    )


def read_stacks(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first; empty if there is none.

    faulthandler writes the main thread last, py-spy (text or JSON) calls it MainThread. py-spy's text
    leaves out the folder that Python imported from, so its paths get a leading slash here: packages are
    then recognised as `/torch/` and `/megatron/` wherever they lie.
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
                file = found["file"]
                path = file if file.startswith(("/", "<")) else f"/{file}"
                threads[-1][1].append(Frame(found["function"], path, int(found["line"])))
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

    A line says of which rank it is in torchrun's prefix, or where its group is that of all ranks: else
    it counts ranks within a group.
    """
    told: set[tuple[int, str, int]] = set()
    for said in _all_said(lines):
        key = (said.rank, said.call.group, said.call.number)
        if key not in told:
            told.add(key)
            yield said


def _all_said(lines: Iterable[str]) -> Iterator[TimedOut]:
    # Its group is in a later line; in none of an old torch.
    unnamed: dict[tuple[str, str], re.Match[str]] = {}
    for line in lines:
        if "atchdog" not in line:
            continue
        if found := _TIMEOUT.search(line):
            name, description = found["guid"], _description(found)
            in_world = found["place"] if description == "default_pg" else None
            if name and (rank := found["rank"] or in_world):
                yield _timed_out(found, rank, name, description)
            elif not name and found["rank"]:
                unnamed.setdefault((found["rank"], found["number"]), found)
        elif (group := _DETECTED.search(line)) and (
            found := unnamed.pop((group["rank"], group["number"]), None)
        ):
            progress = Progress(int(group["entered"]), int(group["completed"]))
            yield _timed_out(found, group["rank"], group["guid"], _description(group), progress)
    for (rank, _), found in unnamed.items():
        yield _timed_out(found, rank, f"unknown to rank {rank}", "")


def _description(group: re.Match[str]) -> str:
    return group["description"] or ("default_pg" if group["guid"] == "0" else "")


def _timed_out(
    found: re.Match[str], rank: str, group: str, description: str, progress: Progress | None = None
) -> TimedOut:
    call = RecordedCall(
        group=group,
        description=description,
        operation=operation_of(found["operation"]),
        number=int(found["number"]),
        sizes=((int(found["elements"]),),) if found["elements"] else (),
    )
    words = found.string[found.string.index("Watchdog caught") :].strip()
    return TimedOut(int(rank), call, progress, words)
