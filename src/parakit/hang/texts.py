"""What a rank says as text: its Python stacks, and NCCL's watchdog in a log."""

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

_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_PY_SPY = re.compile(r"^\s+(?P<function>\S+) \((?P<file>.+?):(?P<line>\d+)\)")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
_SPEAKER = (
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?(?:"
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]+)(?: ?\((?P<description>[^)]*)\))? "
    r"Rank (?P<rank_in_group>\d+)\]|\[Rank (?P<rank_in_unknown_group>\d+)\])"
)
"""Who writes a line: torch 2.2 begins with the rank, 2.3 names the group, 2.4 and 2.7 describe it."""
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
"""How far a rank came in a group: after a timeout with the call's number, at a dump without one."""
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
    """A timeout that NCCL's watchdog reports of a rank."""

    rank: int
    call: RecordedCall
    progress: Progress | None
    """In the call's group."""
    words: str


@dataclass
class WatchdogLog:
    """Calls and counts that torch wrote into a log after ranks waited too long."""

    timeouts: list[TimedOut] = field(default_factory=list)
    """The calls that timed out, each once."""
    progress: dict[int, dict[str, Progress]] = field(default_factory=dict)
    """Progress by rank and group."""
    absent: list[int] = field(default_factory=list)
    """Ranks that rank 0 missed in a monitored barrier of all ranks."""
    compared: dict[int, RecordedCall] = field(default_factory=dict)
    """Calls by rank that torch compared and found to differ."""
    is_rank_uncertain: bool = False
    """Whether a rank was read from a line that counts ranks within a group it does not name."""


MONITORED_BARRIER = "monitored_barrier"
COMPARED_GROUP = "that torch compared"
UNKNOWN_OPERATION = "collective"


def read_watchdog(lines: Iterable[str], rank_of_file: int | None = None) -> WatchdogLog:
    """Read what torch 1.12 and later write of calls that timed out, do not fit, or were never entered.

    A line says of which rank it is in its prefix, or where its group is that of all ranks; otherwise it
    is of `rank_of_file`. torch before 2.2 writes no prefix: the rank that the line counts within an
    unknown group is taken, and `is_rank_uncertain` is set.
    Lines of a rank that is not known are left out.
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
    """Return the rank and the call on one side of a mismatch, `1` or `2`.

    Calls of different numbers do not show which rank is wrong, so each gets a group of its own.
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
    return tuple(int(size) for size in text.split(","))


def _assign_rank(
    match: re.Match[str], rank_of_file: int | None, log: WatchdogLog
) -> list[tuple[int, re.Match[str]]]:
    """Return a line's match with its rank among all ranks; nothing if that rank is not known."""
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
) -> Iterator[TimedOut]:
    """Yield each call that timed out once, with the group and the counts of the line that follows it.

    A count of a timeout whose own line is missing stands for the call, whose operation is then unknown.
    """
    by_call: dict[tuple[int, str], list[re.Match[str]]] = {}
    for rank, match in counts:
        if match["number"]:
            by_call.setdefault((rank, match["number"]), []).append(match)
    seen: set[tuple[int, str, int]] = set()
    stated: set[tuple[int, str]] = set()
    for rank, match in timeouts:
        groups = {match["group"], None}
        following = [
            count
            for count in by_call.get((rank, match["number"]), ())
            if match["group"] is None or count["group"] in groups
        ]
        timed_out = _timed_out(rank, match, following[0] if following else None)
        key = (rank, timed_out.call.group, timed_out.call.number)
        stated.add((rank, match["number"]))
        if key not in seen:
            seen.add(key)
            yield timed_out
    for key_of_count, matches in by_call.items():
        if key_of_count not in stated:
            yield _timed_out(key_of_count[0], matches[0], matches[0])


def _timed_out(rank: int, match: re.Match[str], count: re.Match[str] | None) -> TimedOut:
    """Return the call of a line, in the group that this line or the line of its counts names."""
    named = match if match["group"] or count is None else count
    parts = match.groupdict()
    operation = parts.get("operation")
    sizes: tuple[tuple[int, ...], ...] = ()
    if parts.get("elements"):
        sizes = ((int(parts["elements"]),),)
    elif parts.get("shape"):
        sizes = (_read_shape(parts["shape"]),)
    call = RecordedCall(
        group=named["group"] or _unknown_group(rank),
        description=_describe_group(named),
        operation=normalise_operation(operation) if operation else UNKNOWN_OPERATION,
        number=int(match["number"] or 0),
        sizes=sizes,
    )
    line = match.string
    start = max(line.find("Watchdog caught"), line.find("Timeout at"), 0)
    progress = _read_progress(count) if count else None
    return TimedOut(rank, call, progress, line[start:].strip())


def _read_progress(match: re.Match[str]) -> Progress:
    """Return the counts of a line; torch 2.3 prints memory that nobody wrote where none is completed."""
    entered, completed = int(match["entered"]), int(match["completed"])
    return Progress(entered, completed if completed <= entered else NONE_COMPLETED)


def _describe_group(match: re.Match[str]) -> str:
    return match["description"] or (WORLD if match["group"] == "0" else "")


def _unknown_group(rank: int) -> str:
    return f"unknown to rank {rank}"
