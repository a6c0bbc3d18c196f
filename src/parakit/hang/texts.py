"""Read evidence that is text: Python stacks of a rank, and lines of torch's and NCCL's watchdogs in a log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parakit.hang.dumps import normalise_operation
from parakit.hang.evidence import Frame, Progress, RecordedCall

WORLD = "default_pg"
"""torch's description of the group of all ranks."""
NONE_COMPLETED = -1
"""Number of the last completed collective of a rank that completed none."""

_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY = re.compile(r"^\s+(?P<function>\S+) \((?P<file>.+?):(?P<line>\d+)\)")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
_SPEAKER = (
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?(?:"
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]+)(?: ?\((?P<description>[^)]*)\))? "
    r"Rank (?P<rank_in_group>\d+)\]|\[Rank (?P<rank_in_unknown_group>\d+)\])"
)
"""Prefix of a line with its rank and group: torch 2.2 adds the rank, 2.3 the group, 2.4 and 2.7 its description."""
_TIMEOUT = re.compile(
    _SPEAKER + r".*?Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<number>\d+), )?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?(?:, NumelIn=(?P<elements>\d+))?"
)
"""torch 1.12 has no number; torch 2.0 has a shape, and 2.1 a number of elements."""
_COUNTS = re.compile(
    _SPEAKER + r".*?(?:(?:Timeout at NCCL work|detected by watchdog at work(?: sequence id)?): "
    r"(?P<number>\d+).*?)?[Ll]ast enqueued (?:NCCL )?work: (?P<entered>-?\d+),.*? "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
"""Last entered and completed collective of a rank: after a timeout with the call's number, else without."""
_BARRIER = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?\[Rank 0\]: Ranks? (?P<absent>\d+(?:, ?\d+)*) failed to pass "
    r"monitoredBarrier"
)
_FINGERPRINT = (
    r"Rank (?P<rank{0}>\d+) is running collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<number{0}>\d+), ?)?OpType=(?P<operation{0}>\w+)"
    r"(?:, TensorShape=\[(?P<shape{0}>[\d, ]*)\], TensorDtypes=(?P<dtype{0}>\w+))?"
)
_MISMATCH = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?Detected mismatch between collectives on ranks\. "
    + _FINGERPRINT.format("1")
    + r".*?, but "
    + _FINGERPRINT.format("2")
)
"""What TORCH_DISTRIBUTED_DEBUG=DETAIL reports; the number came with torch 2.0."""
_WATCHDOG_PHRASES = (
    "Watchdog caught",
    "ast enqueued ",
    "failed to pass monitoredBarrier",
    "Detected mismatch between collectives",
)


def is_stacks(text: str) -> bool:
    """Return True if a text is a stack as faulthandler or py-spy writes it."""
    return "most recent call first" in text or bool(
        re.search(r"^Thread \S+ \((?:active|idle)", text, re.MULTILINE)
    )


def read_stacks(text: str) -> tuple[Frame, ...]:
    """Return the frames of a rank's main thread, innermost first; empty if there is none.

    faulthandler writes the main thread last. py-spy (text or JSON) names it MainThread. py-spy's text leaves
    out the folder that Python imported from. Its paths get a leading slash here, so that `/torch/` and
    `/megatron/` are found in them.
    """
    threads = _read_json_threads(text) if text[:1] == "[" else _read_text_threads(text)
    threads_with_frames = [thread for thread in threads if thread.frames]
    for thread in threads_with_frames:
        if "MainThread" in thread.title:
            return tuple(thread.frames)
    return tuple(threads_with_frames[-1].frames) if threads_with_frames else ()


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


class ReportedTimeout(NamedTuple):
    """A timeout of one rank's call that NCCL's watchdog reports."""

    rank: int
    call: RecordedCall
    progress: Progress | None
    """The rank's progress in the call's group; None if the log does not have it."""
    line: str
    """The watchdog's line, without its prefix."""


@dataclass
class WatchdogLog:
    """Calls and counts that torch's watchdogs wrote into a log after ranks had waited too long."""

    timeouts: list[ReportedTimeout] = field(default_factory=list)
    """Calls that timed out; no call is listed twice."""
    progress: dict[int, dict[str, Progress]] = field(default_factory=dict)
    """Progress by rank and group."""
    absent: list[int] = field(default_factory=list)
    """Ranks that never came to a monitored barrier of all ranks."""
    compared: dict[int, RecordedCall] = field(default_factory=dict)
    """Calls by rank that torch compared and found to differ."""
    is_rank_uncertain: bool = False
    """True if a line numbers its rank within a group that the line does not name."""


MONITORED_BARRIER = "monitored_barrier"
"""Name of the operation and of the group of gloo's monitored barrier."""
COMPARED_GROUP = "that torch compared"
"""Name of a group of which a log reports only that calls in it differ."""
UNKNOWN_OPERATION = "collective"
"""Operation of a call of which a log has only the number."""


def read_watchdog(lines: Iterable[str], rank_of_file: int | None = None) -> WatchdogLog:
    """Return what torch 1.12 and later report of calls that timed out, do not fit, or were never entered.

    A line's rank is taken from its prefix, from its rank within the group if the group has all ranks, or else
    from `rank_of_file`. torch before 2.2 writes no prefix. The rank within the unknown group is then taken, and
    `is_rank_uncertain` is set. Lines of an unknown rank are left out.

    Args:
        lines: Lines of the log.
        rank_of_file: Rank in the log's name; None if the name has none.
    """
    log = WatchdogLog()
    timeouts: list[tuple[int, re.Match[str]]] = []
    counts: list[tuple[int, re.Match[str]]] = []
    for line in lines:
        if not any(phrase in line for phrase in _WATCHDOG_PHRASES):
            continue
        if barrier := _BARRIER.search(line):
            # Another rank 0 than that of all ranks leads the barrier of a smaller group.
            if barrier["rank"] in (None, "0"):
                log.is_rank_uncertain |= barrier["rank"] is None
                log.absent += [int(rank) for rank in barrier["absent"].split(",")]
        elif mismatch := _MISMATCH.search(line):
            # Ranks are counted within the group: the prefix shows whether it is that of all ranks.
            if mismatch["rank"] in (None, mismatch["rank1"]):
                log.is_rank_uncertain |= mismatch["rank"] is None
                log.compared |= dict(_compared_call(mismatch, side) for side in ("1", "2"))
        elif match := _TIMEOUT.search(line):
            timeouts += _assign_rank(match, rank_of_file, log)
        elif match := _COUNTS.search(line):
            counts += _assign_rank(match, rank_of_file, log)
    for rank, match in counts:
        group = match["group"] or _unknown_group(rank)
        progress_by_group = log.progress.setdefault(rank, {})
        progress = _read_progress(match)
        progress_by_group[group] = max(progress, progress_by_group.get(group, progress))
    log.timeouts = list(_join_timeouts(timeouts, counts))
    return log


def _compared_call(match: re.Match[str], side: str) -> tuple[int, RecordedCall]:
    """Return the rank and the call on side `1` or `2` of a mismatch that torch reports.

    Calls of different numbers do not show which rank is wrong. They get a group per rank, so that they are
    not compared.
    """
    rank, shape, dtype = match[f"rank{side}"], match[f"shape{side}"], match[f"dtype{side}"]
    has_one_number = match["number1"] == match["number2"]
    call = RecordedCall(
        group=COMPARED_GROUP if has_one_number else f"{COMPARED_GROUP}, as rank {rank} counts",
        description="",
        operation=normalise_operation(match[f"operation{side}"]),
        number=int(match[f"number{side}"] or 0),
        sizes=(_read_shape(shape),) if shape else (),
        dtypes=(dtype,) if dtype else (),
    )
    return int(rank), call


def _read_shape(text: str) -> tuple[int, ...]:
    """Return the sizes in a text such as `4, 8`."""
    return tuple(int(size) for size in text.split(","))


def _assign_rank(
    match: re.Match[str], rank_of_file: int | None, log: WatchdogLog
) -> list[tuple[int, re.Match[str]]]:
    """Return a list of one pair, the global rank of a log line and its match; empty if the rank is not known.

    If the line names neither a global rank nor a group, and the file belongs to no rank, the rank within the
    unknown group is returned, and `log.is_rank_uncertain` is set.
    """
    if match["rank"]:
        return [(int(match["rank"]), match)]
    if match["group"] and _describe_group(match) == WORLD:
        return [(int(match["rank_in_group"]), match)]
    if rank_of_file is not None:
        return [(rank_of_file, match)]
    if match["group"]:
        return []
    log.is_rank_uncertain = True
    return [(int(match["rank_in_unknown_group"]), match)]


def _join_timeouts(
    timeouts: Sequence[tuple[int, re.Match[str]]], counts: Sequence[tuple[int, re.Match[str]]]
) -> Iterator[ReportedTimeout]:
    """Yield the calls that timed out, with group and counts from the line that follows a timeout.

    A call is yielded once. If only the line with the counts is there, the operation is unknown.
    """
    counts_by_call: dict[tuple[int, str], list[re.Match[str]]] = {}
    for rank, match in counts:
        if match["number"]:
            counts_by_call.setdefault((rank, match["number"]), []).append(match)
    seen: set[tuple[int, str, int]] = set()
    stated: set[tuple[int, str]] = set()
    for rank, match in timeouts:
        groups = {match["group"], None}
        following = [
            count
            for count in counts_by_call.get((rank, match["number"]), ())
            if match["group"] is None or count["group"] in groups
        ]
        timeout = _make_timeout(rank, match, following[0] if following else None)
        key = (rank, timeout.call.group, timeout.call.number)
        stated.add((rank, match["number"]))
        if key not in seen:
            seen.add(key)
            yield timeout
    for key_of_count, matches in counts_by_call.items():
        if key_of_count not in stated:
            yield _make_timeout(key_of_count[0], matches[0], matches[0])


def _make_timeout(rank: int, match: re.Match[str], count: re.Match[str] | None) -> ReportedTimeout:
    """Return the timeout of a line. The group is taken from the timeout's line, or else from the line with the
    counts.
    """
    line_with_group = match if match["group"] or count is None else count
    fields = match.groupdict()
    operation = fields.get("operation")
    sizes: tuple[tuple[int, ...], ...] = ()
    if fields.get("elements"):
        sizes = ((int(fields["elements"]),),)
    elif fields.get("shape"):
        sizes = (_read_shape(fields["shape"]),)
    call = RecordedCall(
        group=line_with_group["group"] or _unknown_group(rank),
        description=_describe_group(line_with_group),
        operation=normalise_operation(operation) if operation else UNKNOWN_OPERATION,
        number=int(match["number"] or 0),
        sizes=sizes,
    )
    line = match.string
    start = max(line.find("Watchdog caught"), line.find("Timeout at"), 0)
    progress = _read_progress(count) if count else None
    return ReportedTimeout(rank, call, progress, line[start:].strip())


def _read_progress(match: re.Match[str]) -> Progress:
    """Return the counts of a line."""
    # torch 2.3 prints uninitialised memory as the last completed call if no call is completed.
    entered, completed = int(match["entered"]), int(match["completed"])
    return Progress(entered, completed if completed <= entered else NONE_COMPLETED)


def _describe_group(match: re.Match[str]) -> str:
    """Return the description of a line's group; empty if unknown. Group 0 is that of all ranks."""
    return match["description"] or (WORLD if match["group"] == "0" else "")


def _unknown_group(rank: int) -> str:
    """Return a name for the unknown group of a line of one rank."""
    return f"unknown to rank {rank}"
