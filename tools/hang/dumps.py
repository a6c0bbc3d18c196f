"""A flight recorder's dump, pickle or JSON, of torch 2.5 and later. Nothing of it is executed."""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.hang.evidence import Frame, GroupOfRanks, RankEvidence, RecordedCall
from tools.records.pickles import PlainUnpickler

KEPT_CALLS = 600
"""Of each rank, the last ones: some iterations' worth; 1,024 ranks' stay below 1 GiB."""
DEEPEST_FRAMES = 40

_PEERS = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")
_NOT_OURS = ("/torch/", "c10d_logger", "/tools/ledger/")


class UnreadableError(ValueError):
    """A file that is not what it should be; one sentence that names it."""


@dataclass(frozen=True)
class Dump:
    """One rank's dump."""

    evidence: RankEvidence
    groups: tuple[GroupOfRanks, ...]


def read_dump(path: Path, rank: int, content: bytes) -> Dump:
    """One rank's last calls, and the groups that it is in.

    Raises:
        UnreadableError: The file is truncated, foreign or hostile.
    """
    try:
        found = _load(content)
        groups = tuple(_groups(found.get("pg_config") or {}))
        entries = sorted(found["entries"], key=lambda one: int(one["record_id"]))[-KEPT_CALLS:]
        calls = tuple(_call(entry) for entry in entries)
        dumped = found.get("dumped_ns")
        taken = int(dumped) if dumped is not None else path.stat().st_mtime_ns
        # Archives and copies change a file's time.
        is_later = not calls or taken >= calls[-1].created_ns
    except Exception as error:  # A hostile pickle raises anything.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableError(
            f"{path} is no whole flight recorder dump ({reason}); it was left out."
        ) from error
    return Dump(RankEvidence(rank, calls, dumped_ns=taken if is_later else None), groups)


def _load(content: bytes) -> dict[str, Any]:
    is_json = content[:1] == b"{"
    found = json.loads(content) if is_json else PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise ValueError("it has no list of entries")
    return found


def _groups(config: Mapping[str, Mapping[str, Any]]) -> list[GroupOfRanks]:
    found = []
    for key, one in config.items():
        ranks = one.get("ranks") or []
        listed = json.loads(ranks) if isinstance(ranks, str) else ranks
        # gloo's own entry of the default group has no name.
        name = str(one.get("name") or key or "0")
        description = str(one.get("desc") or ("default_pg" if not key else ""))
        found.append(GroupOfRanks(name, description, tuple(int(rank) for rank in listed)))
    return found


def _call(entry: Mapping[str, Any]) -> RecordedCall:
    name, description = entry["process_group"]
    title = str(entry["profiling_name"])
    operation = title.partition(":")[2] or title
    peer = _PEERS.match(operation)
    is_p2p = bool(entry.get("is_p2p"))
    number = entry["p2p_seq_id"] if is_p2p else entry["collective_seq_id"]
    return RecordedCall(
        _same(str(name)),
        _same(str(description)),
        _same(_same_operation(operation.partition(" ")[0])),
        int(number),
        _same(tuple(tuple(int(n) for n in size) for size in entry.get("input_sizes") or ())),
        _same(tuple(str(each) for each in entry.get("input_dtypes") or ())),
        int(entry["time_created_ns"]),
        bool(entry.get("retired")) or entry.get("state") == "completed",
        entry.get("state") == "started",
        is_p2p or peer is not None,
        int(peer[1]) if peer else None,
        _frames(entry.get("frames") or ()),
    )


def _same_operation(name: str) -> str:
    plain = name.removeprefix("_").removesuffix("_").lower()
    return _OPERATIONS.get(plain, plain)


_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_base": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "receive": "recv",
}


def operation_of(text: str) -> str:
    """torch's word of an operation (`ALLREDUCE`, `_all_gather_base`) as `torch.distributed` calls it."""
    return _same_operation(text)


def _frames(found: Any) -> tuple[Frame, ...]:
    """Those of Megatron and of the user's code; torch's own say nothing."""
    frames = []
    for one in found:
        file = str(one["filename"])
        if not any(part in file for part in _NOT_OURS):
            frames.append(_same(Frame(str(one["name"]), file, int(one["line"]))))
        if len(frames) == DEEPEST_FRAMES:
            break
    return _same(tuple(frames))


_INTERNED: dict[Any, Any] = defaultdict()


def _same[T](value: T) -> T:
    """The one object for all equal values: ranks' calls are much alike."""
    found: T = _INTERNED.setdefault(value, value)
    return found
