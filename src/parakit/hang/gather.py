"""Gather the evidence of a job from files and folders: dumps, stacks, logs and run records.

Files that cannot be read are named in `HangEvidence.refused`, and all other files are used.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil

from parakit.artifacts.run import (
    ASKED_FILE,
    HANG_REASON_PREFIX,
    RUN_FILE,
    STOPPED_FILE,
    Status,
    read_run,
    read_status,
)
from parakit.config.run import RunSpec
from parakit.hang.dumps import UnreadableDumpError, read_dump
from parakit.hang.evidence import (
    UNKNOWN_OPERATION,
    ComparedCalls,
    GroupOfRanks,
    HangEvidence,
    RankEvidence,
    RecordedCall,
    StepStage,
)
from parakit.hang.texts import RankStacks, is_stacks, read_stacks
from parakit.hang.waits import is_in_collective, is_in_recorded_collective
from parakit.hang.watchdog import (
    MONITORED_BARRIER,
    WORLD,
    ReportedTimeout,
    WatchdogLog,
    pair_calls_of_one_number,
    read_watchdog,
)
from parakit.logs import classify_log, parse_printed_spec, scrape_log

LARGEST_DUMP_BYTES = 256 << 20
LARGEST_MEMORY_BYTES = 8 << 30
"""Addresses that reading may allocate. A small hostile pickle can ask for any amount of memory."""

_RANK = re.compile(r"rank[_\-. ]?(\d+)", re.IGNORECASE)
_ATTEMPT = re.compile(r"attempt_\d+")
"""Folder of torchrun's logs, which has a folder per rank of the machine."""
_AUTOGRAD = "/torch/autograd/"
_FILE_OF_COLLECTIVES = "distributed_c10d.py"
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_STATUSES_OF_FAILURES = (Status.CRASHED, Status.OUT_OF_MEMORY)
_SKIPPED_SUFFIXES = {
    *(".idx", ".bin", ".pt", ".distcp", ".png", ".svg", ".html", ".csv", ".safetensors"),
}
_LOG_SUFFIXES = (".log", ".txt", ".out", ".err")
_HEAD_BYTES = 1 << 20
"""Bytes at the beginning of a file that decide what the file is."""


@dataclass
class _GatheredFiles:
    """Content of the files that were read so far."""

    ranks: dict[int, RankEvidence] = field(default_factory=dict)
    groups: list[GroupOfRanks] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    """Logs, which are read after all other files."""
    refused: list[str] = field(default_factory=list)
    """Sentences on files that could not be read."""
    timeouts: dict[int, list[ReportedTimeout]] = field(default_factory=dict)
    """Timeouts by rank, by the logs."""
    compared: list[ComparedCalls] = field(default_factory=list)
    """Pairs of calls that torch compared and found to differ, by the logs."""
    failures: dict[int, str] = field(default_factory=dict)
    """Sentences on ranks that ended by themselves, by the logs."""
    stuck: list[int] = field(default_factory=list)
    """Ranks whose watchdog was blocked, by the logs."""
    blocked_later: list[int] = field(default_factory=list)
    """Ranks whose watchdog was blocked after a call had timed out, by the logs."""
    begun: dict[int, RecordedCall] = field(default_factory=dict)
    """The last call that each rank began, by the logs."""
    is_begun_in_one_group: bool = True
    """False if the ranks began calls of several groups."""
    differing: dict[int, RecordedCall] = field(default_factory=dict)
    """Calls by rank that torch found to differ from a call that no log shows."""
    reported_elsewhere: list[int] = field(default_factory=list)
    """Ranks that reported a timeout first, by the lines of other ranks."""
    asked_ns: int | None = None
    """Time at which the launcher asked the ranks for their stacks, in ns since 1970; None if unknown."""

    def get_rank(self, rank: int) -> RankEvidence:
        """Return the evidence of a rank, which is empty at first and can be changed in place."""
        return self.ranks.setdefault(rank, RankEvidence(rank))


def gather_evidence(paths: Sequence[Path]) -> HangEvidence:
    """Return the evidence of a job from all files in `paths` that contain evidence.

    Args:
        paths: Files, and folders that are read with all their subfolders.

    Raises:
        UnreadableDumpError: A path does not exist, or no file holds evidence of any rank.
    """
    gathered = _GatheredFiles()
    with _limit_memory():
        for path in _list_files(paths):
            try:
                _read_file(path, gathered)
            except (UnreadableDumpError, OSError) as error:
                gathered.refused.append(str(error))
    _read_logs(gathered)
    ranks = _select_known_ranks(gathered)
    if not ranks:
        names = " ".join(map(str, paths))
        reason = f" {gathered.refused[0]}" if gathered.refused else ""
        raise UnreadableDumpError(
            f"DUMPS={names} has no flight recorder dump, no stack and no line of NCCL's watchdog whose "
            f"rank is known.{reason}"
        )
    _drop_late_calls(ranks.values())
    if gathered.asked_ns:
        _restore_waits(ranks.values(), gathered.asked_ns)
    _name_unknown_operations(ranks.values())
    return HangEvidence(
        ranks=ranks,
        groups=_merge_groups(gathered.groups, ranks),
        refused=tuple(gathered.refused),
        timed_out=tuple(timeouts[0].line for timeouts in gathered.timeouts.values()),
        stage=_read_stage(paths, gathered.logs),
        is_over=any(map(_has_failed, paths)),
        compared=tuple(gathered.compared),
        failures=gathered.failures,
        stuck=tuple(gathered.stuck),
        asked_ns=gathered.asked_ns,
        begun=gathered.begun,
        is_begun_in_one_group=gathered.is_begun_in_one_group,
        differing=gathered.differing,
        blocked_later=tuple(gathered.blocked_later),
        reported_elsewhere=tuple(gathered.reported_elsewhere),
    )


def _select_known_ranks(gathered: _GatheredFiles) -> dict[int, RankEvidence]:
    """Return the evidence of each rank that has any, by rank in rising order.

    A rank that only a log reports, as failed, as stuck or as beginning a call, is among them. A file that was
    refused may have left an empty entry of its rank, which is left out.
    """
    reported_ranks = {*gathered.failures, *gathered.stuck, *gathered.begun, *gathered.differing}
    for rank in reported_ranks:
        gathered.get_rank(rank)
    ranks: dict[int, RankEvidence] = {}
    for rank, evidence in sorted(gathered.ranks.items()):
        if evidence.is_known or evidence.dumped_ns or rank in reported_ranks:
            ranks[rank] = evidence
    return ranks


def _drop_late_calls(ranks: Collection[RankEvidence]) -> None:
    """Remove, in place, calls of stopped ranks that are later than the first dump of a running rank.

    A rank that a signal had stopped made these calls because the launcher let it continue for its dump, after the
    other ranks had written theirs.
    """
    dump_times = [evidence.dumped_ns for evidence in ranks if not evidence.is_stopped]
    first_dump_ns = min(filter(None, dump_times), default=sys.maxsize)
    for evidence in ranks:
        if evidence.is_stopped:
            evidence.calls = tuple(
                call for call in evidence.calls if call.created_ns <= first_dump_ns
            )


def _restore_waits(ranks: Collection[RankEvidence], asked_ns: int) -> None:
    """Restore, in place, the state of the calls at the time when the ranks were asked for their stacks.

    The signal that asks for stacks ends some waits in C code. A rank that hung there continues, and so do the
    ranks that waited for it. Calls after this time are removed. If a rank's stack is in a collective that a
    flight recorder stores, the rank's last remaining call becomes unfinished. Nothing changes if no rank made a
    call after this time.
    """
    if not any(call.created_ns > asked_ns for evidence in ranks for call in evidence.calls):
        return
    for evidence in ranks:
        calls = [call for call in evidence.calls if call.created_ns <= asked_ns]
        if calls and is_in_recorded_collective(evidence.stack):
            calls[-1] = replace(calls[-1], is_done=False)
        evidence.calls = tuple(calls)


def _name_unknown_operations(ranks: Collection[RankEvidence]) -> None:
    """Fill in unknown operations of calls in place, with the operation of another rank's call of the same number.

    An operation stays unknown if no rank recorded it.
    """
    operations: dict[tuple[str, int], str] = {}
    for evidence in ranks:
        for call in evidence.calls:
            if call.operation != UNKNOWN_OPERATION and not call.is_point_to_point:
                operations[call.group, call.number] = call.operation
    for evidence in ranks:
        named_calls = []
        for call in evidence.calls:
            operation = operations.get((call.group, call.number))
            if call.operation == UNKNOWN_OPERATION and operation is not None:
                named_calls.append(replace(call, operation=operation))
            else:
                named_calls.append(call)
        evidence.calls = tuple(named_calls)


def _read_logs(gathered: _GatheredFiles) -> None:
    """Read the logs in place: what torch and torchrun wrote completes the evidence of ranks without a dump."""
    for path in gathered.logs:
        with path.open(errors="replace") as lines:
            log = read_watchdog(lines, _find_rank_of_log(path))
        _add_log(gathered, path, log)
    if gathered.is_begun_in_one_group:
        gathered.compared += pair_calls_of_one_number(gathered.begun)
    for pair in gathered.compared:
        for rank, call in pair:
            _set_missing_calls(gathered.get_rank(rank), [call])
    for rank, timeouts in gathered.timeouts.items():
        _set_missing_calls(gathered.get_rank(rank), [timeout.call for timeout in timeouts])


def _add_log(gathered: _GatheredFiles, path: Path, log: WatchdogLog) -> None:
    """Add the reports of one log to `gathered`."""
    gathered.groups += log.groups
    gathered.stuck += log.stuck
    gathered.blocked_later += log.blocked_later
    gathered.reported_elsewhere += log.reported_elsewhere
    gathered.begun |= log.begun
    gathered.differing |= log.differing
    gathered.is_begun_in_one_group &= log.is_begun_in_one_group
    gathered.compared += log.compared
    for timeout in log.timeouts:
        gathered.timeouts.setdefault(timeout.rank, []).append(timeout)
    for rank, progress in log.progress.items():
        evidence = gathered.get_rank(rank)
        if not evidence.calls:
            evidence.progress = {**progress, **evidence.progress}
    if log.absent:
        _add_barrier(gathered, log.absent)
    if log.is_rank_uncertain:
        gathered.refused.append(
            f"{path} counts ranks within a group that it does not name, as torch before 2.2 does: "
            "its rank N is rank N of the job only if that group is the one of all ranks."
        )
    _add_failure(gathered, path, log)
    for rank, call in log.unfinished.items():
        evidence = gathered.get_rank(rank)
        # The calls of a rank with a timeout are those of its timeouts, which are set after the last log.
        if rank not in gathered.timeouts:
            _set_missing_calls(evidence, [call])


def _set_missing_calls(evidence: RankEvidence, calls: Iterable[RecordedCall]) -> None:
    """Set a rank's calls to those that a log reports. A rank that has calls already is unchanged."""
    if not evidence.calls:
        evidence.calls = tuple(calls)


def _find_rank_of_log(path: Path) -> int | None:
    """Return the rank in a log's name, or else in the name of its folder; None if neither contains a rank.

    torchrun names files `attempt_0/7/stderr.log`. On all machines but the first, the 7 is the rank on its
    machine.
    """
    match = _RANK.search(path.name)
    if match:
        return int(match[1])
    folder = path.absolute().parent
    if folder.name.isdecimal() and _ATTEMPT.fullmatch(folder.parent.name):
        return int(folder.name)
    return None


def _add_failure(gathered: _GatheredFiles, path: Path, log: WatchdogLog) -> None:
    """Record the rank that failed by itself, with the reason, if the log names such a rank.

    If the log names only the rank's number on its machine, a sentence that asks for more logs is added to
    `gathered.refused` instead. Nothing is recorded if torch reports calls that do not fit together or ranks that
    were absent, because any rank may raise the error that follows.
    """
    any_rank_may_raise_error = log.compared or log.absent or log.unfinished
    if any_rank_may_raise_error:
        return
    scraped_log = scrape_log(path)
    status = classify_log(scraped_log)
    failed_by_itself = status.status in _STATUSES_OF_FAILURES
    if status.rank is not None and failed_by_itself:
        gathered.failures.setdefault(status.rank, status.reason)
    elif scraped_log.trace.root_cause_local_rank is not None:
        gathered.refused.append(_explain_local_rank(path, status.reason))


def _explain_local_rank(path: Path, reason: str) -> str:
    """Return a sentence on a log that names the failed rank by its number on one machine, and why it failed."""
    return (
        f"{path} counts ranks on one machine: {reason.rstrip('.')}. On the first machine this is also "
        "its rank in the job; add the logs of the ranks or torchrun's list of failures (Root Cause)."
    )


def _add_barrier(gathered: _GatheredFiles, absent: Sequence[int]) -> None:
    """Add the call in which rank 0 waits for the ranks that are absent from a monitored barrier."""
    group = GroupOfRanks(MONITORED_BARRIER, WORLD, (0, *absent))
    gathered.groups.append(group)
    barrier = RecordedCall(group.name, group.description, MONITORED_BARRIER, number=0, sizes=())
    gathered.get_rank(0).calls = gathered.get_rank(0).calls or (barrier,)


def _list_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of all paths, sorted within each folder. Files that cannot hold evidence are left out.

    The suffix of a name shows whether a file can hold evidence.

    Raises:
        UnreadableDumpError: A path does not exist.
    """
    for path in paths:
        if not path.exists():
            raise UnreadableDumpError(
                f"DUMPS={path} does not exist; name the files that the job left, or their folder."
            )
        candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
        for candidate in candidates:
            if candidate.is_file() and candidate.suffix not in _SKIPPED_SUFFIXES:
                yield candidate


def _read_file(path: Path, gathered: _GatheredFiles) -> None:
    """Read a dump, stacks, or a note of the launcher into `gathered`; store the path of a log for later.

    The launcher's notes are the list of stopped ranks and the time at which ranks were asked for stacks. Other
    files are ignored.

    Raises:
        OSError: The file cannot be read.
        UnreadableDumpError: The file is too large or damaged, or its name has no rank.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if path.name == STOPPED_FILE:
        # The launcher saw that a signal had stopped these ranks, and continued them for their dumps.
        for number in head.split():
            gathered.get_rank(int(number)).is_stopped = True
    elif path.name == ASKED_FILE and head.strip().isdigit():
        gathered.asked_ns = int(head)
    elif _is_dump(head):
        if path.stat().st_size > LARGEST_DUMP_BYTES:
            raise UnreadableDumpError(
                f"{path} is larger than any flight recorder dump; it was left out."
            )
        evidence = gathered.get_rank(_find_rank_in_name(path))
        gathered.groups += read_dump(path, evidence)
    elif _is_stack(path, head):
        rank = _find_rank_in_name(path)
        try:
            _add_stacks(gathered.get_rank(rank), read_stacks(path.read_text(errors="replace")))
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableDumpError(
                f"{path} is no complete stack ({error}); it was left out."
            ) from error
    elif path.suffix in _LOG_SUFFIXES or b"Watchdog" in head or b"ProcessGroup" in head:
        gathered.logs.append(path)


def _add_stacks(evidence: RankEvidence, stacks: RankStacks) -> None:
    """Set a rank's stack in place, and the rank's other threads that are in a collective.

    On a device, backward runs in a thread of autograd while the main thread waits for it. The stack of this
    thread is then the rank's stack.
    """
    communicating = [
        thread
        for thread in stacks.other_threads
        if is_in_collective(thread.frames)
        and any(frame.file.endswith(_FILE_OF_COLLECTIVES) for frame in thread.frames)
    ]
    evidence.stack = stacks.main
    is_in_backward = bool(stacks.main) and _AUTOGRAD in stacks.main[0].file
    if is_in_backward and communicating:
        evidence.stack = communicating.pop(0).frames + stacks.main
    evidence.communicating_threads = tuple(communicating)


def _is_dump(head: bytes) -> bool:
    """Return True if a file begins as a pickle, or as a JSON object with entries."""
    return head[:1] == b"\x80" or (head[:1] == b"{" and b'"entries"' in head)


def _is_stack(path: Path, head: bytes) -> bool:
    """Return True if a file is a stack as py-spy (JSON or text) or faulthandler writes it."""
    if head[:1] == b"[":
        return b'"thread_name"' in head
    # A log may hold a stack, too, but its name has no rank.
    has_rank = _RANK.search(path.name) is not None
    return has_rank and is_stacks(head.decode(errors="replace"))


def _find_rank_in_name(path: Path) -> int:
    """Return the rank in a file's name: the number after `rank`, else the last number.

    Raises:
        UnreadableDumpError: The name has no number.
    """
    match = _RANK.search(path.name) or _LAST_NUMBER.search(path.name)
    if match is None:
        raise UnreadableDumpError(
            f"{path} does not say of which rank it is; name it rank<N>, as in rank12.pkl."
        )
    return int(match[1])


def _merge_groups(
    groups_of_dumps: Sequence[GroupOfRanks], ranks: Mapping[int, RankEvidence]
) -> dict[str, GroupOfRanks]:
    """Return all groups by name, with the ranks that dumps and logs list and the ranks that made calls in the group.

    A group is marked as not whole if no dump lists its ranks and no log shows how many there are.
    """
    groups: dict[str, GroupOfRanks] = {}
    for group in groups_of_dumps:
        if group.name not in groups or len(group.ranks) > len(groups[group.name].ranks):
            groups[group.name] = group
    callers_by_group: dict[tuple[str, str], set[int]] = {}
    for rank, evidence in ranks.items():
        for call in evidence.calls:
            callers_by_group.setdefault((call.group, call.description), set()).add(rank)
    # A log also counts the calls of ranks that timed out in no call of the group.
    for (name, _), callers in callers_by_group.items():
        callers.update(rank for rank, evidence in ranks.items() if name in evidence.progress)
    for (name, description), callers in callers_by_group.items():
        listed = groups.get(name, GroupOfRanks(name, description, (), is_whole=False))
        all_ranks = tuple(sorted({*callers, *listed.ranks}))
        groups[name] = GroupOfRanks(
            name, description or listed.description, all_ranks, is_whole=listed.is_whole
        )
    return groups


def _read_stage(paths: Sequence[Path], logs: Sequence[Path]) -> StepStage | None:
    """Return the number of layers and micro batches of a pipeline stage.

    They come from the first run folder with a readable record, else from the first log that prints its
    arguments. None means that neither exists, that the run has virtual stages, or that the number of micro
    batches is not known.
    """
    spec: RunSpec | None = None
    for path in paths:
        for folder in (path, path.parent):
            if spec is None and (folder / RUN_FILE).is_file():
                # A file of this name may belong to another tool, and then has another shape.
                with suppress(msgspec.DecodeError, OSError):
                    spec = read_run(folder).spec
    for log in logs:
        spec = spec or parse_printed_spec(scrape_log(log).arguments, None)
    if spec is None or spec.parallelism.virtual_stages > 1 or not spec.microbatches:
        return None
    return StepStage(spec.layers_per_stage, spec.microbatches)


def _has_failed(path: Path) -> bool:
    """Return True if `path` is in the folder of a run that crashed by itself.

    A run that the user or the hang detection ended gives False, because its ranks are where they hung.
    """
    for folder in (path, path.parent):
        with suppress(msgspec.DecodeError, OSError):
            status = read_status(folder)
            is_hang = status.reason.startswith(HANG_REASON_PREFIX)
            return status.status is Status.CRASHED and not is_hang
    return False


@contextmanager
def _limit_memory() -> Iterator[None]:
    """Limit the address space of the process to LARGEST_MEMORY_BYTES more than now, within the `with` block.

    A limit that exists already is not changed.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    if before[0] == resource.RLIM_INFINITY:
        limit = psutil.Process().memory_info().vms + LARGEST_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
