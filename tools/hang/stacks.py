"""Python stacks of a process: faulthandler's text, py-spy's text and JSON."""

from __future__ import annotations

import json
import re

from tools.hang.evidence import Frame

_FAULTHANDLER = re.compile(r'^\s+File "(.*)", line (\d+) in (.*)$')
_PY_SPY = re.compile(r"^\s+(\S+) \((.+?):(\d+)\)")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")


def is_stacks(text: str) -> bool:
    """Whether a text is a stack of one of these kinds."""
    return "most recent call first" in text or bool(
        re.search(r"^Thread \S+ \((?:active|idle)", text, re.MULTILINE)
    )


def read_stacks(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first; empty if there is none.

    faulthandler writes the main thread last, py-spy calls it MainThread.
    """
    threads = _of_json(text) if text[:1] == "[" else _of_text(text)
    if not threads:
        return ()
    named = next((frames for title, frames in threads if "MainThread" in title), None)
    return named if named is not None else threads[-1][1]


def _of_json(text: str) -> list[tuple[str, tuple[Frame, ...]]]:
    return [
        (
            str(one.get("thread_name")),
            tuple(Frame(f["name"], f["filename"], int(f["line"])) for f in one["frames"]),
        )
        for one in json.loads(text)
    ]


def _of_text(text: str) -> list[tuple[str, tuple[Frame, ...]]]:
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif threads and (found := _FAULTHANDLER.match(line)):
            threads[-1][1].append(Frame(found[3], found[1], int(found[2])))
        elif threads and (found := _PY_SPY.match(line)):
            threads[-1][1].append(Frame(found[1], found[2], int(found[3])))
    return [(title, tuple(frames)) for title, frames in threads if frames]
