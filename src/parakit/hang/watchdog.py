"""Read what torch writes into a log about calls that hang: lines of NCCL's watchdog, and of torch's checks of calls.

The wordings are those of torch 1.12 to 2.15. Lines that a terminal wrapped are joined again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from parakit.hang.dumps import normalise_operation, select_frames
from parakit.hang.evidence import (
    UNKNOWN_GROUP,
    UNKNOWN_OPERATION,
    UNNAMED_GROUP,
    ComparedCalls,
    Frame,
    GroupOfRanks,
    Progress,
    RecordedCall,
)

WORLD = "default_pg"
"""torch's description of the group of all ranks."""
COMPARED_GROUP = "that torch compared"
"""Name of a group of which a log reports only that calls in it differ."""
MONITORED_BARRIER = "monitored_barrier"
"""Name of the operation and of the group of gloo's monitored barrier."""
NONE_COMPLETED = -1
"""Number of the last completed collective of a rank that completed none."""
MOST_CALLS_APART = 10
"""Most calls by which numbers of lines differ that are taken for one group, if some of the lines name no group."""
MOST_WRAPPED_LINES = 4
"""Most lines that are joined to a line that a terminal wrapped."""

_SPEAKER = (
    r"(?:\[(?:rank|RANK )(?P<rank>\d+)\]:?.*?)?(?:"
    r"\[PG (?P<id>\d+)?(?:ID \d+ PG GUID (?P<guid>[^\s(\]]+))?(?: ?\((?P<description>[^)]*)\))? "
    r"Rank (?P<rank_in_group>\d+)\]|\[Rank (?P<rank_in_unknown_group>\d+)\])"
)
"""Prefix of a line with its rank and group: torch 2.2 adds the rank, 2.3 the group, 2.4 and 2.7 its description."""
_TIMEOUT = re.compile(
    _SPEAKER + r".*?(?:Watchdog caught collective operation timeout: |Work )WorkNCCL\("
    r"(?:SeqNum=(?P<number>\d+), *)?OpType=(?P<operation>\w+)"
    r"(?:, *TensorShape=\[(?P<shape>[\d, ]*)\])?"
    r"(?:, *NumelIn=(?P<elements>\d+))?(?:, *NumelOut=(?P<elements_out>\d+))?"
)
"""torch 1.12 has no number; torch 2.0 has a shape, and 2.1 a number of elements."""
_TIMEOUT_END = re.compile(r"ran for |timed out in blocking wait")
_COUNTS = re.compile(
    _SPEAKER + r".*?(?:(?:Timeout at NCCL work|detected by watchdog at work(?: sequence id)?): "
    r"(?P<number>\d+).*?)?[Ll]ast enqueued (?:NCCL )?work: (?P<entered>-?\d+),.*? "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
"""Last entered and completed collective of a rank: after a timeout with the call's number, else without."""
_STUCK = re.compile(
    _SPEAKER + r".*?(?:watchdog got stuck for \d+ seconds|Heartbeat monitor timed out!)"
)
"""Report that the watchdog's own thread is blocked: by a call of CUDA, or by a thread that holds Python's lock."""
_BARRIER = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?(?:\[Rank 0\]: )?Ranks? (?P<absent>\d+(?:, ?\d+)*) failed to pass "
    r"monitoredBarrier"
)
_FINGERPRINT = (
    r"CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<number{0}>\d+)(?:, ?)?)?OpType=(?P<operation{0}>[A-Z_]+)"
    r"(?:, *TensorShape=\[(?P<shape{0}>[\d, ]*)\], *TensorDtypes=(?P<dtype{0}>\w+))?"
)
_DIFFERENT_CALL = r"Rank (?P<rank{0}>\d+) is running (?:inconsistent )?collective: " + _FINGERPRINT
_REPORT_OF_MISMATCH = "Detected mismatch between collectives"
_MISMATCH = re.compile(
    r"(?:\[rank(?P<rank>\d+)\]:.*?)?Detected mismatch between collectives on ranks\. "
    + _DIFFERENT_CALL.format("1")
    + r"(?:.*?, but "
    + _DIFFERENT_CALL.format("2")
    + ")?"
)
"""Report of TORCH_DISTRIBUTED_DEBUG=DETAIL. It has the number since torch 2.0, and the other rank's call since 1.13."""
_BEGUN = re.compile(_SPEAKER + r".*?Running collective: " + _FINGERPRINT.format(""))
"""Call that a rank begins: TORCH_DISTRIBUTED_DEBUG=DETAIL with TORCH_CPP_LOG_LEVEL=INFO, since torch 2.0."""
_SIGNAL = re.compile(
    r"dump signal due to a collective timeout from\s+rank (?P<rank_of_timeout>\d+)"
)
"""Report of a rank that another rank's watchdog asked for its dump, since torch 2.4."""
_TRACE_HEADING = re.compile(_SPEAKER + r".*?Stack trace of the failed collective: *$")
_TRACE_FRAME = re.compile(r"^#\d+ (?P<function>\S+) from (?P<file>.+):(?P<line>\d+)$")
"""Frames of the call that timed out, innermost first, if the flight recorder was on; since torch 2.5."""
_LISTED = r"\[(?P<ranks>[\d, ]+)\]"
_DESYNC = re.compile(
    _LISTED + r" (?:joined but didn't finish collective #(?P<started>\d+)"
    r"|finished collective #(?P<finished>\d+), but didn't join"
    r"|are the lagging ranks that caused this (?P<absent>timeout))"
)
"""Report of TORCH_NCCL_DESYNC_DEBUG=1 on the ranks of a group after a timeout."""
_SNAPSHOT_HEADING = re.compile(r"^\s*#(?P<number>\d+) (?:started|finished) ranks:")
_SNAPSHOT = re.compile(r"^\s*" + _LISTED + r" (?P<state>started|finished) (?P<operation>[A-Z_]+)")
_TERMINATED = "watchdog thread terminated"
_TIME = re.compile(r"\[E(?P<date>\d{3,4}) (?P<time>\d\d:\d\d:\d\d)")
"""Month, day and time at the beginning of torch's error lines: `[E1206 18:44:12.715298746`."""
_PHRASES = re.compile(
    r"Watchdog caught|watchdog thread terminated|ast enqueued |timed out in blocking wait"
    r"|failed to pass monitoredBarrier|Detected mismatch between|watchdog got stuck|Heartbeat monitor timed out"
    r"|finish(?:ed)? collective #|lagging ranks that caused|^\s*#\d+ (?:started|finished) ranks:"
    r"|^\s*\[[\d, ]+\] (?:started|finished) [A-Z]"
    r"|Running collective: |Stack trace of the failed collective: *$|^#\d+ \S+ from .+:\d+$"
)
_BEGINS_LINE = re.compile(r"\[(?:rank|RANK |E |W |I )|terminate called|\s*what\(\):")


class ReportedTimeout(NamedTuple):
    """A timed-out call of one rank, as NCCL's watchdog reports it."""

    rank: int
    call: RecordedCall
    progress: Progress | None
    """The rank's progress in the call's group; None if the log does not have it."""
    line: str
    """The watchdog's line, without its prefix."""


@dataclass
class WatchdogLog:
    """Calls and counts that torch wrote into a log when ranks had waited too long, or before it ended them."""

    timeouts: list[ReportedTimeout] = field(default_factory=list)
    """Calls that timed out; no call is listed twice."""
    progress: dict[int, dict[str, Progress]] = field(default_factory=dict)
    """Progress by rank and group."""
    unfinished: dict[int, RecordedCall] = field(default_factory=dict)
    """Calls by rank that a rank entered and did not complete, as torch's report on a group lists them."""
    groups: list[GroupOfRanks] = field(default_factory=list)
    """Groups whose ranks follow from the lines; whole if the lines also show how many ranks there are."""
    absent: list[int] = field(default_factory=list)
    """Ranks that never came to a monitored barrier of all ranks."""
    compared: list[ComparedCalls] = field(default_factory=list)
    """Pairs of calls that torch compared and found to differ."""
    stuck: list[int] = field(default_factory=list)
    """Ranks whose watchdog was blocked before any call timed out, in the order of the log."""
    blocked_later: list[int] = field(default_factory=list)
    """Ranks whose watchdog was blocked after a call had timed out, in the order of the log."""
    begun: dict[int, RecordedCall] = field(default_factory=dict)
    """The last call that each rank began, of any group. Such lines name no group, and no end of a call."""
    is_begun_in_one_group: bool = True
    """False if the ranks began calls of several groups."""
    differing: dict[int, RecordedCall] = field(default_factory=dict)
    """Calls by rank that torch found to differ from a call that the log does not show."""
    reported_elsewhere: list[int] = field(default_factory=list)
    """Ranks that reported a timeout first, by the lines of other ranks."""
    is_rank_uncertain: bool = False
    """True if a line numbers its rank within a group that the line does not name."""


def read_watchdog(lines: Iterable[str], rank_of_file: int | None = None) -> WatchdogLog:
    """Return what a log of torch 1.12 or later reports about calls that timed out, do not fit, or were never entered.

    The rank of a line is in its prefix. If the prefix names only the rank in a group, this rank is used for the
    group of all ranks, and `rank_of_file` for other groups. torch before 2.2 writes no prefix: the rank within
    the unknown group is then used, and `is_rank_uncertain` is set. Lines of an unknown rank are left out.

    Args:
        lines: Lines of the log.
        rank_of_file: Rank in the log's name; None if the name has none.
    """
    reader = _LogReader(rank_of_file)
    for line in _join_wrapped_lines(lines):
        reader.feed(line)
    return reader.finish()


def _join_wrapped_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that torch wrote about calls. A line that a terminal wrapped is yielded in one piece.

    At most MOST_WRAPPED_LINES lines are appended to a line. A line that begins with a rank's prefix is never
    appended.
    """
    wrapped, num_joined = "", 0
    for raw_line in lines:
        line = raw_line.rstrip("\r\n")
        if wrapped:
            is_continued = num_joined < MOST_WRAPPED_LINES and not _BEGINS_LINE.match(line)
            if is_continued:
                wrapped, num_joined = wrapped + line, num_joined + 1
            if not is_continued or _is_complete(wrapped):
                yield wrapped
                wrapped = ""
            if is_continued:
                continue
        if not _PHRASES.search(line):
            continue
        if _is_complete(line):
            yield line
        else:
            wrapped, num_joined = line, 0
    if wrapped:
        yield wrapped


def _is_complete(line: str) -> bool:
    """Return True if a report that begins in this line also ends in it, so that the line was not cut off.

    A line in which no known report begins also gives True.
    """
    if "Watchdog caught" in line:
        return _TIMEOUT_END.search(line) is not None
    if _TERMINATED in line:
        return "exception: " in line
    if _REPORT_OF_MISMATCH in line:
        match = _MISMATCH.search(line)
        has_other_rank = match is not None and bool(match["rank2"] or match["dtype1"])
        return has_other_rank and ("inconsistent" in line or "but Rank" in line)
    return "ast enqueued" not in line or _COUNTS.search(line) is not None


@dataclass(frozen=True)
class _Speaker:
    """The rank that wrote a line, and its group as far as the line names the group."""

    rank: int
    rank_in_group: int
    group: str | None
    """Name of the group; None if the line names none."""
    description: str = ""
    has_global_name: bool = True
    """True if the group's name is unique in the job. torch 2.3 and 2.4 number the groups of each rank instead."""


class _SpokenLine(NamedTuple):
    """A line that matched one of the patterns, with the rank that it is of."""

    speaker: _Speaker
    match: re.Match[str]


class _DesyncEntry(NamedTuple):
    """A statement in torch's report on a group: ranks that started, finished or never entered a collective."""

    reporter: _Speaker
    ranks: tuple[int, ...]
    number: int | None
    """Number of the collective; None for ranks that came to no collective at all."""
    is_finished: bool
    operation: str = UNKNOWN_OPERATION


class _LogReader:
    """Reader of one log. `feed` gets the log line by line, and `finish` returns the result."""

    def __init__(self, rank_of_file: int | None) -> None:
        self._rank_of_file = rank_of_file
        self._log = WatchdogLog()
        self._timeouts: list[_SpokenLine] = []
        self._counts: list[_SpokenLine] = []
        self._desync: list[_DesyncEntry] = []
        self._stuck: list[_SpokenLine] = []
        self._snapshot_number: int | None = None
        self._inconsistent: dict[int, RecordedCall] = {}
        self._begun_calls_by_rank = Counter[int]()
        self._rank_of_trace: int | None = None
        self._frames: dict[int, list[Frame]] = {}

    def feed(self, line: str) -> None:
        """Read one line and store the report that it contains, if there is one."""
        if self._feed_trace(line):
            return
        if signal := _SIGNAL.search(line):
            self._log.reported_elsewhere.append(int(signal["rank_of_timeout"]))
        if _REPORT_OF_MISMATCH in line:
            self._feed_mismatch(line)
        elif match := _BEGUN.search(line):
            self._feed_begun_call(match)
        elif barrier := _BARRIER.search(line):
            self._feed_barrier(barrier)
        elif match := _TIMEOUT.search(line):
            self._timeouts += self._assign_rank(match)
        elif match := _COUNTS.search(line):
            self._counts += self._assign_rank(match)
        elif match := _STUCK.search(line):
            self._stuck += self._assign_rank(match)
        else:
            self._feed_desync(line)

    def finish(self) -> WatchdogLog:
        """Return everything that the lines report, with each call assigned to a group."""
        log = self._log
        namer = _GroupNamer([*self._timeouts, *self._counts])
        log.timeouts = list(_join_timeouts(self._timeouts, self._counts, namer))
        for speaker, match in self._counts:
            group = namer.name_group(speaker, int(match["number"]) if match["number"] else None)
            _advance(log, speaker.rank, group, _read_progress(match))
        for timeout in log.timeouts:
            # The watchdog reports a rank's oldest unfinished call first.
            if timeout.call.number and timeout.progress is None:
                progress = Progress(timeout.call.number, timeout.call.number - 1)
                _advance(log, timeout.rank, timeout.call.group, progress)
        log.timeouts = [self._add_frames(timeout) for timeout in log.timeouts]
        if len(self._inconsistent) > 1:
            log.compared += _pair_different_calls(self._inconsistent)
        else:
            log.differing |= self._inconsistent
        self._add_desync(namer)
        self._add_stuck_ranks()
        has_enough_calls = all(count > 1 for count in self._begun_calls_by_rank.values())
        log.is_begun_in_one_group &= has_enough_calls
        log.groups = namer.list_groups(log.timeouts)
        return log

    def _feed_trace(self, line: str) -> bool:
        """Read a line of the stack of a call that timed out; return False if the line is none.

        Only the first stack of a rank is kept, which is that of its oldest unfinished call.
        """
        if heading := _TRACE_HEADING.search(line):
            spoken_lines = self._assign_rank(heading)
            rank = spoken_lines[0].speaker.rank if spoken_lines else None
            self._rank_of_trace = None if rank in self._frames else rank
            return True
        frame = _TRACE_FRAME.match(line)
        if frame is None:
            self._rank_of_trace = None
            return False
        if self._rank_of_trace is not None:
            frames = self._frames.setdefault(self._rank_of_trace, [])
            frames.append(Frame(frame["function"], frame["file"], int(frame["line"])))
        return True

    def _add_frames(self, timeout: ReportedTimeout) -> ReportedTimeout:
        """Return a timeout with the frames of its call, if the log has the stack of the rank's first timeout."""
        frames = self._frames.pop(timeout.rank, None)
        if frames is None:
            return timeout
        return timeout._replace(call=replace(timeout.call, frames=select_frames(frames)))

    def _feed_begun_call(self, match: re.Match[str]) -> None:
        """Store the call that a rank begins, as its last one.

        The line names no group. All calls are of one group if the numbers of each rank rise by 1. A single line of
        a rank does not show this.
        """
        number_in_group = int(match["rank_in_unknown_group"] or match["rank_in_group"])
        rank = int(match["rank"] or number_in_group)
        self._log.is_rank_uncertain |= match["rank"] is None
        call = _read_compared_call(match, "")
        known_call = self._log.begun.get(rank)
        follows = known_call is None or call.number == known_call.number + 1
        self._log.is_begun_in_one_group &= follows and rank == number_in_group
        self._log.begun[rank] = call
        self._begun_calls_by_rank[rank] += 1

    def _feed_barrier(self, barrier: re.Match[str]) -> None:
        """Store the ranks that are absent from a monitored barrier of all ranks.

        A barrier whose leader is not rank 0 of the job belongs to a smaller group and is ignored.
        """
        if barrier["rank"] in (None, "0"):
            self._log.is_rank_uncertain |= barrier["rank"] is None
            self._log.absent += [int(rank) for rank in barrier["absent"].split(",")]

    def _feed_mismatch(self, line: str) -> None:
        """Store the calls that torch compared and found different.

        torch counts the ranks within the group, and only the line's prefix can show the ranks of the job.
        """
        match = _MISMATCH.search(line)
        if match is None or match["rank"] not in (None, match["rank1"]):
            return
        self._log.is_rank_uncertain |= match["rank"] is None
        first = (int(match["rank1"]), _read_compared_call(match, "1"))
        if match["rank2"]:
            second = (int(match["rank2"]), _read_compared_call(match, "2"))
            self._log.compared.append((first, second))
        else:
            self._inconsistent.setdefault(*first)

    def _feed_desync(self, line: str) -> None:
        """Read a line of the report on a group's ranks that torch writes after one of them timed out."""
        heading = _SNAPSHOT_HEADING.match(line)
        if heading:
            self._snapshot_number = int(heading["number"])
            return
        reporter = self._timeouts[-1].speaker if self._timeouts else None
        if reporter is None or reporter.rank != reporter.rank_in_group:
            return
        desync = _DESYNC.search(line)
        if desync:
            number = desync["started"] or desync["finished"]
            entry = _DesyncEntry(
                reporter,
                ranks=_read_ranks(desync["ranks"]),
                number=int(number) if number else None,
                is_finished=desync["started"] is None,
            )
            self._desync.append(entry)
            return
        snapshot = _SNAPSHOT.match(line)
        if snapshot and self._snapshot_number is not None:
            entry = _DesyncEntry(
                reporter,
                ranks=_read_ranks(snapshot["ranks"]),
                number=self._snapshot_number,
                is_finished=snapshot["state"] == "finished",
                operation=normalise_operation(snapshot["operation"]),
            )
            self._desync.append(entry)

    def _add_desync(self, namer: _GroupNamer) -> None:
        """Add the states of ranks that torch's reports on groups list, and mark these groups as whole."""
        for entry in self._desync:
            group = namer.name_group(entry.reporter, None)
            namer.add_ranks(group, entry.ranks)
            if entry.number is None:
                continue
            for rank in entry.ranks:
                completed = entry.number if entry.is_finished else NONE_COMPLETED
                _advance(self._log, rank, group, Progress(entry.number, completed))
                known_call = self._log.unfinished.get(rank)
                is_named = known_call is not None and known_call.operation != UNKNOWN_OPERATION
                if not entry.is_finished and not is_named:
                    self._log.unfinished[rank] = RecordedCall(
                        group=group,
                        description=namer.describe(group),
                        operation=entry.operation,
                        number=entry.number,
                        sizes=(),
                    )

    def _add_stuck_ranks(self) -> None:
        """Add the ranks whose watchdog was blocked, apart by whether a call had timed out before.

        After a timeout the watchdog ends the process, which can block it, too.
        """
        times_of_timeouts = [
            _read_time(line.match.string) for line in self._timeouts + self._counts
        ]
        for line in self._stuck:
            time_of_block = _read_time(line.match.string)
            is_first = all(
                time_of_block is not None and time is not None and time_of_block < time
                for time in times_of_timeouts
            )
            ranks = self._log.stuck if is_first else self._log.blocked_later
            if line.speaker.rank not in ranks:
                ranks.append(line.speaker.rank)

    def _assign_rank(self, match: re.Match[str]) -> list[_SpokenLine]:
        """Return a list with the line and its rank; empty if the rank is not known.

        A line may name neither a rank of the job nor a group, in a file that belongs to no rank. Then the rank within
        the unknown group is used, and `is_rank_uncertain` is set.
        """
        number_in_group = int(match["rank_in_group"] or match["rank_in_unknown_group"])
        has_group = match["rank_in_group"] is not None
        group = match["guid"] or match["id"] if has_group else None
        description = match["description"] or (WORLD if group == "0" else "")
        has_global_name = match["guid"] is not None or description == WORLD
        if match["rank"]:
            rank = int(match["rank"])
        elif description == WORLD:
            rank = number_in_group
        elif self._rank_of_file is not None:
            rank = self._rank_of_file
        elif has_group:
            return []
        else:
            self._log.is_rank_uncertain = True
            rank = number_in_group
        speaker = _Speaker(
            rank, number_in_group, group, description=description, has_global_name=has_global_name
        )
        return [_SpokenLine(speaker, match)]


class _GroupNamer:
    """Names of the groups in a log's lines, and the ranks that these groups have for certain.

    torch sorts the ranks of a group. So if a rank has the same number in a group as in the job, all lower ranks
    are in the group, too.
    """

    def __init__(self, spoken_lines: Sequence[_SpokenLine]) -> None:
        self._ranks: dict[str, set[int]] = {}
        self._descriptions: dict[str, str] = {}
        self._whole: set[str] = set()
        self._group_by_call: dict[tuple[int, int], str] = {}
        speakers = [spoken.speaker for spoken in spoken_lines]
        self._ambiguous = _find_ambiguous_groups(speakers)
        for speaker, match in spoken_lines:
            if speaker.group is not None:
                group = self._name_known_group(speaker)
                self._descriptions[group] = self._descriptions.get(group) or speaker.description
                if match["number"]:
                    self._group_by_call[speaker.rank, int(match["number"])] = group
        self._group_of_others = self._find_group_of_others(spoken_lines)
        for speaker, match in spoken_lines:
            number = int(match["number"]) if match["number"] else None
            self._add_speaker(self.name_group(speaker, number), speaker)

    def name_group(self, speaker: _Speaker, number: int | None) -> str:
        """Return the name of a line's group; `unknown to rank N` if it cannot be determined.

        `number` is the number of the line's call, or None if the line has no number.
        """
        if speaker.group is not None:
            return self._name_known_group(speaker)
        if number is not None and (speaker.rank, number) in self._group_by_call:
            return self._group_by_call[speaker.rank, number]
        if self._group_of_others is not None and speaker.rank == speaker.rank_in_group:
            return self._group_of_others
        return f"{UNKNOWN_GROUP} {speaker.rank}"

    def describe(self, group: str) -> str:
        """Return torch's description of a group; empty if no line has it."""
        return self._descriptions.get(group, "")

    def add_ranks(self, group: str, ranks: Iterable[int]) -> None:
        """Add ranks that torch's report lists. Such a report lists all ranks of the group."""
        self._ranks.setdefault(group, set()).update(ranks)
        self._whole.add(group)

    def list_groups(self, timeouts: Iterable[ReportedTimeout]) -> list[GroupOfRanks]:
        """Return the groups, each with the ranks that it has for certain.

        A group is marked as whole if its size is also known. The sizes of an all-gather or a reduce-scatter show it,
        because one of output and input is as many times larger than the other.
        """
        for timeout in timeouts:
            ranks = self._ranks.get(timeout.call.group, set())
            size = _find_group_size(timeout.line)
            # Only if the ranks are counted from 0 is it known which ranks the group has.
            if size and ranks == set(range(max(ranks, default=0) + 1)) and size >= len(ranks):
                ranks.update(range(size))
                self._whole.add(timeout.call.group)
        return [
            GroupOfRanks(
                group, self.describe(group), tuple(sorted(ranks)), is_whole=group in self._whole
            )
            for group, ranks in self._ranks.items()
        ]

    def _name_known_group(self, speaker: _Speaker) -> str:
        """Return the name of a group that the line names, made unique in the job if it is not."""
        group = str(speaker.group)
        return f"{group} of rank {speaker.rank}" if group in self._ambiguous else group

    def _add_speaker(self, group: str, speaker: _Speaker) -> None:
        """Add the rank of a line to its group, and the lower ranks if the line proves that they are members."""
        is_counted_from_0 = speaker.rank == speaker.rank_in_group and not group.startswith(
            "unknown"
        )
        ranks = range(speaker.rank + 1) if is_counted_from_0 else (speaker.rank,)
        self._ranks.setdefault(group, set()).update(ranks)

    def _find_group_of_others(self, spoken_lines: Sequence[_SpokenLine]) -> str | None:
        """Return the group to which lines without a group's name belong; None if it may be one of several.

        It is the only group that other lines name. If no line names a group, it is UNNAMED_GROUP. The numbers of the
        calls must be close to each other. If no line names a group or has a prefix, all ranks must be in one call.
        """
        unnamed = [spoken for spoken in spoken_lines if spoken.speaker.group is None]
        if any(line.speaker.rank != line.speaker.rank_in_group for line in unnamed):
            return None
        numbers = [int(line.match["number"]) for line in spoken_lines if line.match["number"]]
        if numbers and max(numbers) - min(numbers) > MOST_CALLS_APART:
            return None
        named_groups = {
            self._name_known_group(spoken.speaker)
            for spoken in spoken_lines
            if spoken.speaker.group is not None
        }
        if len(named_groups) > 1:
            return None
        if named_groups:
            (group,) = named_groups
            return group
        has_prefixes = all(line.match["rank"] for line in unnamed)
        calls = {(line.match["number"], line.match["operation"]) for line in unnamed}
        return UNNAMED_GROUP if has_prefixes or len(calls) == 1 else None


def _find_ambiguous_groups(speakers: Iterable[_Speaker]) -> set[str]:
    """Return the group names that several groups share. Two ranks with the same number in a group show this."""
    ranks_by_number: dict[tuple[str, int], set[int]] = {}
    for speaker in speakers:
        if speaker.group is not None and not speaker.has_global_name:
            key = (speaker.group, speaker.rank_in_group)
            ranks_by_number.setdefault(key, set()).add(speaker.rank)
    return {group for (group, _), ranks in ranks_by_number.items() if len(ranks) > 1}


def _advance(log: WatchdogLog, rank: int, group: str, progress: Progress) -> None:
    """Raise the counts of a rank in a group to those of a line, if these are higher."""
    by_group = log.progress.setdefault(rank, {})
    known = by_group.get(group, progress)
    by_group[group] = Progress(
        max(known.entered, progress.entered), max(known.completed, progress.completed)
    )


_OPERATIONS_ON_ONE_TENSOR = {
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
}
"""Operations that torch tells from those on lists of tensors when it compares calls."""


def _read_time(line: str) -> tuple[int, str] | None:
    """Return month and day as one number, and the time of day, of a line of torch; None if the line has none."""
    match = _TIME.search(line)
    return (int(match["date"]), match["time"]) if match else None


def _read_compared_call(match: re.Match[str], side: str) -> RecordedCall:
    """Return the call on side `1` or `2` of a mismatch that torch reports, or that of a line with one call (``)."""
    shape, dtype, operation = (
        match[f"shape{side}"],
        match[f"dtype{side}"],
        match[f"operation{side}"],
    )
    return RecordedCall(
        group=COMPARED_GROUP,
        description="",
        operation=_OPERATIONS_ON_ONE_TENSOR.get(operation) or normalise_operation(operation),
        number=int(match[f"number{side}"] or 0),
        sizes=(_read_shape(shape),) if shape else (),
        dtypes=(dtype,) if dtype else (),
    )


def _pair_different_calls(calls: dict[int, RecordedCall]) -> list[ComparedCalls]:
    """Return pairs of ranks with their calls: a rank with a different call, and a rank with the usual call.

    torch up to 1.12 reports the call of each rank that finds a difference, and not the call that it differs from.
    """
    usual_call, _ = Counter(calls.values()).most_common(1)[0]
    usual_rank = next(rank for rank, call in calls.items() if call == usual_call)
    return [
        ((rank, call), (usual_rank, usual_call))
        for rank, call in calls.items()
        if call != usual_call
    ]


def pair_calls_of_one_number(begun: Mapping[int, RecordedCall]) -> list[ComparedCalls]:
    """Return pairs of ranks whose last calls have the highest number and differ; empty if all calls are equal.

    Before each call torch waits for all ranks of the group, so ranks with the highest number met in one call.
    """
    last_number = max((call.number for call in begun.values()), default=0)
    calls = {rank: call for rank, call in begun.items() if call.number == last_number}
    if len(set(calls.values())) < 2:
        return []
    usual_call, _ = Counter(calls.values()).most_common(1)[0]
    usual_ranks = [rank for rank, call in calls.items() if call == usual_call]
    return [
        ((rank, call), (usual_rank, usual_call))
        for rank, call in calls.items()
        if call != usual_call
        for usual_rank in usual_ranks
    ]


def _read_shape(text: str) -> tuple[int, ...]:
    """Return the sizes in a text such as `4, 8`."""
    return tuple(int(size) for size in text.split(",") if size.strip())


def _read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a text such as `0, 1,2`."""
    return tuple(int(rank) for rank in text.split(",") if rank.strip())


def _join_timeouts(
    timeouts: Sequence[_SpokenLine], counts: Sequence[_SpokenLine], namer: _GroupNamer
) -> Iterator[ReportedTimeout]:
    """Yield the calls that timed out, with the group and the counts from the line after the timeout.

    Each call is yielded once. If only the line with the counts exists, the operation is unknown.
    """
    counts_by_call: dict[tuple[int, str], list[_SpokenLine]] = {}
    for count in counts:
        if count.match["number"]:
            key = (count.speaker.rank, count.match["number"])
            counts_by_call.setdefault(key, []).append(count)
    seen: set[tuple[int, str, int]] = set()
    stated: set[tuple[int, str]] = set()
    for line in timeouts:
        rank, group = line.speaker.rank, line.speaker.group
        following = [
            count
            for count in counts_by_call.get((rank, line.match["number"]), ())
            if group is None or count.speaker.group in (group, None)
        ]
        timeout = _make_timeout(line, following[0] if following else None, namer)
        key_of_timeout = (rank, timeout.call.group, timeout.call.number)
        stated.add((rank, line.match["number"]))
        if key_of_timeout not in seen:
            seen.add(key_of_timeout)
            yield timeout
    for key_of_count, lines in counts_by_call.items():
        if key_of_count not in stated:
            yield _make_timeout(lines[0], lines[0], namer)


def _make_timeout(
    line: _SpokenLine, count: _SpokenLine | None, namer: _GroupNamer
) -> ReportedTimeout:
    """Return the timeout that a line reports.

    Its group is taken from the line, or else from the line with the counts.
    """
    speaker = line.speaker
    if speaker.group is None and count is not None:
        speaker = count.speaker
    text = line.match.string
    fields = line.match.groupdict()
    sizes: tuple[tuple[int, ...], ...] = ()
    if fields.get("elements"):
        sizes = ((int(fields["elements"]),),)
    elif fields.get("shape"):
        sizes = (_read_shape(fields["shape"]),)
    operation = _find_operation_of_coalesced(text)
    if not operation:
        stated = fields.get("operation")
        operation = normalise_operation(stated) if stated else UNKNOWN_OPERATION
    number = int(line.match["number"] or 0)
    group = namer.name_group(speaker, number or None)
    call = RecordedCall(
        group=group,
        description=namer.describe(group),
        operation=operation,
        number=number,
        sizes=sizes,
        is_reported=True,
    )
    start = max(text.find("Watchdog caught"), text.find("Timeout at"), 0)
    progress = _read_progress(count.match) if count else None
    return ReportedTimeout(line.speaker.rank, call, progress, text[start:].strip())


_SIZES = re.compile(
    r"OpType=_?(?P<operation>ALLGATHER|REDUCE_SCATTER|COALESCED)(?:_BASE)?, *NumelIn=(?P<given>\d+), "
    r"*NumelOut=(?P<received>\d+)"
)
"""Sizes of a call that show how many ranks its group has."""


def _find_group_size(line: str) -> int | None:
    """Return the number of ranks of a group, from the sizes of an all-gather or a reduce-scatter; None if unknown."""
    match = _SIZES.search(line)
    if match is None:
        return None
    shard, full = sorted((int(match["given"]), int(match["received"])))
    is_reduced = match["operation"] == "REDUCE_SCATTER"
    if match["operation"] != "COALESCED" and is_reduced != (int(match["given"]) == full):
        return None
    return full // shard if shard and full % shard == 0 and full > shard else None


def _find_operation_of_coalesced(line: str) -> str:
    """Return the operation of collectives that torch joined in one call, if the sizes of the call show it.

    An all-gather receives a multiple of what the rank gives. A reduce-scatter receives a fraction of it. All other
    sizes give an empty text. For example, an all-reduce and a message receive as much as they give.
    """
    match = _SIZES.search(line)
    if match is None or match["operation"] != "COALESCED":
        return ""
    # The group size is the quotient of both sizes. It is None for equal sizes, and for sizes with a remainder.
    if _find_group_size(line) is None:
        return ""
    return "all_gather" if int(match["received"]) > int(match["given"]) else "reduce_scatter"


def _read_progress(match: re.Match[str]) -> Progress:
    """Return the counts of a line."""
    # torch 2.3 prints uninitialised memory as the last completed call if no call is completed.
    entered, completed = int(match["entered"]), int(match["completed"])
    return Progress(entered, completed if completed <= entered else NONE_COMPLETED)
