"""Read the Python stacks of a rank, as faulthandler and py-spy write them."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from parakit.hang.evidence import Frame, ThreadStack

_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY = re.compile(r"^\s+(?P<function>\S+) \((?P<file>.+?):(?P<line>\d+)\)")
_THREAD = re.compile(r"^\s*(?:Current thread|Thread) ")
_NAME_OF_THREAD = re.compile(r'"(?P<name>[^"]+)"')


def is_stacks(text: str) -> bool:
    """Return True if a text is a stack as faulthandler or py-spy writes it."""
    return "most recent call first" in text or bool(
        re.search(r"^\s*Thread \S+ \((?:active|idle)", text, re.MULTILINE)
    )


class RankStacks(NamedTuple):
    """The stacks of all threads of a rank."""

    main: tuple[Frame, ...]
    """Frames of the main thread, innermost first; empty if the text has none."""
    other_threads: tuple[ThreadStack, ...]
    """The other threads that have frames, in the order of the text."""


def read_stacks(text: str) -> RankStacks:
    """Return the stacks of a rank's threads, with the innermost frame first.

    The main thread is the last one that faulthandler writes, and the one that py-spy calls MainThread. py-spy's
    text leaves out the folder that Python imported from. Its paths get a leading slash here, so that the packages
    `/torch/` and `/megatron/` are recognised.
    """
    threads = _read_json_threads(text) if text[:1] == "[" else _read_text_threads(text)
    threads_with_frames = [thread for thread in threads if thread.frames]
    if not threads_with_frames:
        return RankStacks((), ())
    main = next(
        (thread for thread in threads_with_frames if "MainThread" in thread.title),
        threads_with_frames[-1],
    )
    other_threads = [
        ThreadStack(_find_name(thread.title), tuple(thread.frames))
        for thread in threads_with_frames
        if thread is not main
    ]
    return RankStacks(tuple(main.frames), tuple(other_threads))


class _Thread(NamedTuple):
    """A thread of a stack file: its title and its frames, innermost first."""

    title: str
    frames: list[Frame]


def _read_json_threads(text: str) -> list[_Thread]:
    """Return the threads of py-spy's JSON."""
    return [
        _Thread(
            str(thread.get("thread_name")),
            [
                Frame(frame["name"], frame["filename"], int(frame["line"]))
                for frame in thread["frames"]
            ],
        )
        for thread in json.loads(text)
    ]


def _read_text_threads(text: str) -> list[_Thread]:
    """Return the threads of a text by faulthandler or py-spy."""
    threads: list[_Thread] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append(_Thread(line, []))
            continue
        match = _FAULTHANDLER.match(line) or _PY_SPY.match(line)
        if threads and match:
            file = match["file"]
            path = file if file.startswith(("/", "<")) else f"/{file}"
            threads[-1].frames.append(Frame(match["function"], path, int(match["line"])))
    return threads


def _find_name(title: str) -> str:
    """Return the name of a thread: the quoted part of py-spy's heading, else the heading."""
    match = _NAME_OF_THREAD.search(title)
    return match["name"] if match else title.strip().rstrip(":")
