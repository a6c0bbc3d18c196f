"""From folders and files to the evidence of a job. What cannot be read is named; the rest is used."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from tools.hang.dumps import Dump, UnreadableError, read_dump
from tools.hang.evidence import Evidence, Frame, GroupOfRanks, RankEvidence, RecordedCall
from tools.hang.logs import watchdog_calls
from tools.hang.stacks import is_stacks, read_stacks
from tools.records.run import RUN_FILE, STOPPED_FILE, read_run
from tools.report.read.printed import printed_spec
from tools.report.read.scrape import scrape_log

LARGEST_DUMP_BYTES = 256 << 20
LARGEST_MEMORY_BYTES = 8 << 30
"""Of addresses beyond those in use: a small hostile pickle can ask for any amount."""

_RANK = re.compile(r"rank[_\-. ]?(\d+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_SKIPPED = {".idx", ".bin", ".pt", ".distcp", ".png", ".svg", ".html", ".csv", ".safetensors"}
_HEAD_BYTES = 1 << 20


def gather(places: Sequence[Path], stopped: Iterable[int] = ()) -> Evidence:
    """All that lies there, of any kind.

    Args:
        places: Files and folders, which are read with all folders in them.
        stopped: Ranks that a signal is known to have stopped.

    Raises:
        UnreadableError: Nothing there says anything of a rank.
    """
    dumps: dict[int, Dump] = {}
    stacks: dict[int, tuple[Frame, ...]] = {}
    stopped = {*stopped, *_stopped(places)}
    logs: list[Path] = []
    refused: list[str] = []
    with _bounded_memory():
        for path in _files(places):
            try:
                _read(path, dumps, stacks, logs)
            except (UnreadableError, OSError) as error:
                refused.append(str(error))
    watched = _watched(logs)
    ranks = {}
    running = [dump.evidence.dumped_ns for rank, dump in dumps.items() if rank not in stopped]
    before_ns = min(filter(None, running), default=sys.maxsize)
    for rank in sorted({*dumps, *stacks, *watched, *stopped}):
        one = dumps[rank].evidence if rank in dumps else RankEvidence(rank)
        calls = one.calls or tuple(call for call, _ in watched.get(rank, ()))
        # A stopped rank went on for its dump, after the others' dumps.
        calls = tuple(call for call in calls if rank not in stopped or call.created_ns <= before_ns)
        ranks[rank] = replace(
            one, calls=calls, stack=stacks.get(rank, ()), is_stopped=rank in stopped
        )
    if not ranks:
        where = " ".join(map(str, places))
        why = f" {refused[0]}" if refused else ""
        raise UnreadableError(
            f"DUMPS={where} has no flight recorder dump, no stack and no watchdog's line of a rank.{why}"
        )
    groups = _groups(dumps.values(), ranks)
    words = tuple(text for found in watched.values() for _, text in found[:1])
    return Evidence(ranks, groups, tuple(refused), words, _layers(places, logs))


def _stopped(places: Sequence[Path]) -> Iterator[int]:
    """Ranks that the launcher saw stopped; it continued them for their dumps."""
    for place in places:
        for path in place.rglob(STOPPED_FILE) if place.is_dir() else ():
            yield from map(int, path.read_text().split())


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        if not place.exists():
            raise UnreadableError(f"DUMPS={place} does not exist.")
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (path for path in inside if path.is_file() and path.suffix not in _SKIPPED)


def _read(
    path: Path,
    dumps: dict[int, Dump],
    stacks: dict[int, tuple[Frame, ...]],
    logs: list[Path],
) -> None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head[:1] == b"\x80" or (head[:1] == b"{" and b'"entries"' in head):
        if path.stat().st_size > LARGEST_DUMP_BYTES:
            raise UnreadableError(
                f"{path} is larger than any flight recorder dump; it was left out."
            )
        rank = _rank_of(path)
        dumps[rank] = read_dump(path, rank, path.read_bytes())
    elif _is_stack(path, head):
        stacks[_rank_of(path)] = _stack(path)
    elif b"Watchdog" in head or path.suffix in (".log", ".txt", ".out", ".err"):
        logs.append(path)


def _is_stack(path: Path, head: bytes) -> bool:
    if head[:1] == b"[":
        return b'"thread_name"' in head
    # A log may hold a stack, too; it is not named after one rank.
    return bool(_RANK.search(path.name)) and is_stacks(head.decode(errors="replace"))


def _stack(path: Path) -> tuple[Frame, ...]:
    try:
        return read_stacks(path.read_text(errors="replace"))
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"{path} is no whole stack ({error}); it was left out.") from error


def _rank_of(path: Path) -> int:
    found = _RANK.search(path.name) or _LAST_NUMBER.search(path.name)
    if found is None:
        raise UnreadableError(
            f"{path} does not say of which rank it is; name it rank<N>, as in rank12.pkl."
        )
    return int(found[1])


def _watched(logs: Sequence[Path]) -> Mapping[int, list[tuple[RecordedCall, str]]]:
    found: dict[int, list[tuple[RecordedCall, str]]] = {}
    for log in logs:
        with log.open(errors="replace") as lines:
            for rank, call, text in watchdog_calls(lines):
                found.setdefault(rank, []).append((call, text))
    return found


def _groups(dumps: Iterable[Dump], ranks: Mapping[int, RankEvidence]) -> dict[str, GroupOfRanks]:
    """As dumps list them; else those whose ranks made calls in them."""
    listed: dict[str, GroupOfRanks] = {}
    for dump in dumps:
        for group in dump.groups:
            if len(group.ranks) > len(listed.get(group.name, group).ranks) or (
                group.name not in listed and group.ranks
            ):
                listed[group.name] = group
    seen: dict[str, dict[int, str]] = {}
    for rank, one in ranks.items():
        for call in one.calls:
            seen.setdefault(call.group, {})[rank] = call.description
    for name, members in seen.items():
        description = next(iter(members.values()))
        known = listed.get(name)
        among = sorted({*members, *(known.ranks if known else ())})
        listed[name] = GroupOfRanks(name, description, tuple(among))
    return listed


def _layers(places: Sequence[Path], logs: Sequence[Path]) -> int | None:
    """Layers that a stage holds: of a run folder's record, or of the arguments that a log prints."""
    for place in places:
        for folder in (place, place.parent):
            if (folder / RUN_FILE).is_file():
                # Another tool's file of that name says nothing.
                with suppress(msgspec.DecodeError, OSError):
                    return read_run(folder).spec.layers_a_stage
    for log in logs:
        spec = printed_spec(scrape_log(log).arguments, None)
        if spec is not None:
            return spec.layers_a_stage
    return None


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
