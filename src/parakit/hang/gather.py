"""From folders and files to the evidence of a job. What cannot be read is named; the rest is used."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from parakit.artifacts.run import (
    HANG_REASON_PREFIX,
    RUN_FILE,
    STOPPED_FILE,
    Status,
    read_run,
    read_status,
)
from parakit.config.run import RunSpec
from parakit.hang.dumps import UnreadableDumpError, read_dump
from parakit.hang.evidence import GroupOfRanks, HangEvidence, RankEvidence, RecordedCall, StepStage
from parakit.hang.texts import (
    MONITORED_BARRIER,
    WORLD,
    TimedOut,
    is_stacks,
    read_stacks,
    read_watchdog,
)
from parakit.logs import parse_printed_spec, scrape_log

LARGEST_DUMP_BYTES = 256 << 20
LARGEST_MEMORY_BYTES = 8 << 30
"""Of addresses beyond those in use: a small hostile pickle can ask for any amount."""

_RANK = re.compile(r"rank[_\-. ]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_SKIPPED = {".idx", ".bin", ".pt", ".distcp", ".png", ".svg", ".html", ".csv", ".safetensors"}
_HEAD_BYTES = 1 << 20


@dataclass
class _Found:
    """What lies there."""

    ranks: dict[int, RankEvidence] = field(default_factory=dict)
    groups: list[GroupOfRanks] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def of(self, rank: int) -> RankEvidence:
        return self.ranks.setdefault(rank, RankEvidence(rank))


def gather_evidence(places: Sequence[Path]) -> HangEvidence:
    """All that lies there, of any kind.

    Args:
        places: Files and folders, which are read with all folders in them.

    Raises:
        UnreadableError: Nothing there says anything of a rank.
    """
    found = _Found()
    with _bounded_memory():
        for path in _files(places):
            try:
                _read(path, found)
            except (UnreadableDumpError, OSError) as error:
                found.refused.append(str(error))
    watched = _read_logs(found)
    # What a refused file began says nothing.
    known = (one for one in found.ranks.values() if one.is_known or one.dumped_ns)
    ranks = {one.rank: one for one in sorted(known, key=lambda one: one.rank)}
    if not ranks:
        where = " ".join(map(str, places))
        why = f" {found.refused[0]}" if found.refused else ""
        raise UnreadableDumpError(
            f"DUMPS={where} has no flight recorder dump, no stack and no line of NCCL's watchdog that "
            f"says of which rank it is.{why}"
        )
    # A stopped rank went on for its dump, after the others' dumps.
    running = [one.dumped_ns for one in ranks.values() if not one.is_stopped]
    before_ns = min(filter(None, running), default=sys.maxsize)
    for one in ranks.values():
        if one.is_stopped:
            one.calls = tuple(call for call in one.calls if call.created_ns <= before_ns)
    words = tuple(said[0].words for said in watched.values())
    groups = _groups(found.groups, ranks)
    stage, is_over = _stage(places, found.logs), any(map(_has_failed, places))
    return HangEvidence(ranks, groups, tuple(found.refused), words, stage, is_over)


def _read_logs(gathered: _Found) -> dict[int, list[TimedOut]]:
    """Add what watchdogs wrote of ranks that left no dump; return the calls that timed out, by rank."""
    watched: dict[int, list[TimedOut]] = {}
    for path in gathered.logs:
        named = _RANK.search(path.name)
        with path.open(errors="replace") as lines:
            log = read_watchdog(lines, int(named[1]) if named else None)
        for timed_out in log.timeouts:
            watched.setdefault(timed_out.rank, []).append(timed_out)
        for rank, progress in log.progress.items():
            evidence = gathered.of(rank)
            if not evidence.calls:
                evidence.progress = {**progress, **evidence.progress}
        for rank, call in log.compared.items():
            evidence = gathered.of(rank)
            evidence.calls = evidence.calls or (call,)
        if log.absent:
            _add_barrier(gathered, log.absent)
        if log.is_rank_uncertain:
            gathered.refused.append(
                f"{path} counts ranks within a group that it does not name, as torch before 2.2 does: "
                "its rank N is rank N of the job only if that group is the one of all ranks."
            )
    for rank, timeouts in watched.items():
        evidence = gathered.of(rank)
        if not evidence.calls:
            evidence.calls = tuple(timed_out.call for timed_out in timeouts)
    return watched


def _add_barrier(gathered: _Found, absent: Sequence[int]) -> None:
    """Add the call in which rank 0 waited for the ranks that never came to a monitored barrier."""
    group = GroupOfRanks(MONITORED_BARRIER, WORLD, (0, *absent))
    gathered.groups.append(group)
    barrier = RecordedCall(group.name, group.description, MONITORED_BARRIER, number=0, sizes=())
    gathered.of(0).calls = gathered.of(0).calls or (barrier,)


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        if not place.exists():
            raise UnreadableDumpError(f"DUMPS={place} does not exist.")
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (path for path in inside if path.is_file() and path.suffix not in _SKIPPED)


def _read(path: Path, found: _Found) -> None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if path.name == STOPPED_FILE:
        # The launcher saw these stopped, and continued them for their dumps.
        for number in head.split():
            found.of(int(number)).is_stopped = True
    elif head[:1] == b"\x80" or (head[:1] == b"{" and b'"entries"' in head):
        if path.stat().st_size > LARGEST_DUMP_BYTES:
            raise UnreadableDumpError(
                f"{path} is larger than any flight recorder dump; it was left out."
            )
        found.groups += read_dump(path, found.of(_rank_of(path)))
    elif (
        b'"thread_name"' in head
        if head[:1] == b"["
        # A log may hold a stack, too; it is not named after one rank.
        else _RANK.search(path.name) and is_stacks(head.decode(errors="replace"))
    ):
        rank = _rank_of(path)
        try:
            found.of(rank).stack = read_stacks(path.read_text(errors="replace"))
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableDumpError(
                f"{path} is no whole stack ({error}); it was left out."
            ) from error
    elif b"Watchdog" in head or path.suffix in (".log", ".txt", ".out", ".err"):
        found.logs.append(path)


def _rank_of(path: Path) -> int:
    found = _RANK.search(path.name) or _LAST_NUMBER.search(path.name)
    if found is None:
        raise UnreadableDumpError(
            f"{path} does not say of which rank it is; name it rank<N>, as in rank12.pkl."
        )
    return int(found[1])


def _groups(
    found: Sequence[GroupOfRanks], ranks: Mapping[int, RankEvidence]
) -> dict[str, GroupOfRanks]:
    """As dumps list them; else those whose ranks made calls in them."""
    listed: dict[str, GroupOfRanks] = {}
    for group in found:
        if len(group.ranks) > (len(listed[group.name].ranks) if group.name in listed else 0):
            listed[group.name] = group
    members: dict[tuple[str, str], set[int]] = {}
    for rank, one in ranks.items():
        for call in one.calls:
            members.setdefault((call.group, call.description), set()).add(rank)
    # A log also counts the calls of ranks that timed out in no call of the group.
    for (name, _), seen in members.items():
        seen.update(rank for rank, evidence in ranks.items() if name in evidence.progress)
    for (name, description), seen in members.items():
        known = listed[name].ranks if name in listed else ()
        ranks_of_it = tuple(sorted({*seen, *known}))
        listed[name] = GroupOfRanks(name, description, ranks_of_it, is_whole=name in listed)
    return listed


def _stage(places: Sequence[Path], logs: Sequence[Path]) -> StepStage | None:
    """Of a run folder's record, or of the arguments that a log prints; of virtual stages nothing."""
    spec: RunSpec | None = None
    for folder in (folder for place in places for folder in (place, place.parent)):
        if spec is None and (folder / RUN_FILE).is_file():
            # Another tool's file of that name says nothing.
            with suppress(msgspec.DecodeError, OSError):
                spec = read_run(folder).spec
    for log in logs:
        spec = spec or parse_printed_spec(scrape_log(log).arguments, None)
    if spec is None or spec.parallelism.virtual_stages > 1 or not spec.microbatches:
        return None
    return StepStage(spec.layers_per_stage, spec.microbatches)


def _has_failed(place: Path) -> bool:
    """Whether a run failed by itself, as its status says: ranks of one that hung are where they hung."""
    for folder in (place, place.parent):
        with suppress(msgspec.DecodeError, OSError):
            status = read_status(folder)
            return status.status is Status.CRASHED and not status.reason.startswith(
                HANG_REASON_PREFIX
            )
    return False


@contextmanager
def _bounded_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    if before[0] == resource.RLIM_INFINITY:
        limit = psutil.Process().memory_info().vms + LARGEST_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
