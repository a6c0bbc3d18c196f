"""A flight recorder's dump, pickle or JSON, of torch 2.5 and later. Nothing of it is executed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parakit.artifacts.pickles import PlainUnpickler
from parakit.hang.evidence import (
    Frame,
    GroupOfRanks,
    Progress,
    RankEvidence,
    RecordedCall,
    counts_calls,
)

KEPT_CALLS = 600
"""Of each rank, the last ones: some iterations' worth; 1,024 ranks' stay below 1 GiB."""
DEEPEST_FRAMES = 40

_PEERS = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")
_KIND_OF_TENSOR = re.compile("_(base|into_tensor|tensor)$")
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "allreducecoalesced": "all_reduce_coalesced",
    "receive": "recv",
}
_FILES_OF_TORCH = ("/torch/", "c10d_logger")


class UnreadableDumpError(ValueError):
    """A file that is not what it should be; one sentence that names it."""


def read_dump(path: Path, one: RankEvidence) -> list[GroupOfRanks]:
    """Fill in a rank's last calls, and when they were dumped; the groups that it is in.

    Raises:
        UnreadableError: The file is truncated, foreign or hostile.
    """
    try:
        content = path.read_bytes()
        is_json = content[:1] == b"{"
        found = json.loads(content) if is_json else PlainUnpickler(io.BytesIO(content)).load()
        if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
            raise ValueError("it has no list of entries")
        groups = _groups(found.get("pg_config") or {})
        progress = _progress(found.get("pg_status") or {}, groups)
        entries = sorted(found["entries"], key=lambda one: int(one["record_id"]))[-KEPT_CALLS:]
        calls = tuple(_call(entry) for entry in _apply_batch_ends(entries))
        taken = int(found.get("dumped_ns") or path.stat().st_mtime_ns)
    except Exception as error:  # A hostile pickle raises anything.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableDumpError(
            f"{path} is no whole flight recorder dump ({reason}); it was left out."
        ) from error
    one.progress = progress
    # Archives and copies change a file's time.
    one.calls, one.dumped_ns = calls, taken if not calls or taken >= calls[-1].created_ns else None
    return groups


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


def _apply_batch_ends(entries: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of a batch of messages NCCL's recorder keeps each and then the end, which alone says how far they
    are. Those of a batch that was not ended were not sent."""
    found: list[dict[str, Any]] = []
    batches: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for entry in map(dict, entries):
        key = str(entry["process_group"][0]), int(entry["p2p_seq_id"])
        is_end = str(entry["profiling_name"]).endswith(":coalesced")
        if entry.get("is_p2p") and not is_end:
            batches.setdefault(key, []).append(entry)
        elif is_end and not entry["collective_seq_id"]:
            entry["is_p2p"] = True
            for one in batches.pop(key, ()):
                one |= {name: entry.get(name) for name in ("state", "retired")}
        found.append(entry)
    unsent = {id(one) for batch in batches.values() for one in batch if _is_of_a_batch(one)}
    return [one for one in found if id(one) not in unsent]


def _is_of_a_batch(entry: Mapping[str, Any]) -> bool:
    return any(frame["name"] == "batch_isend_irecv" for frame in entry.get("frames") or ())


def _progress(
    status: Mapping[str, Mapping[str, Any]], groups: list[GroupOfRanks]
) -> dict[str, Progress]:
    """NCCL's count by group. It has numbers of its own for them, and both are in the order of creation.

    Where stages exchange it counts their messages as well, whose numbers are of another sequence.
    """
    numbered = [group for group in groups if group.name.isdecimal()]
    if len(numbered) != len(status):
        return {}
    numbered.sort(key=lambda group: int(group.name))
    counts = (status[number] for number in sorted(status, key=int))
    return {
        group.name: Progress(
            int(count["last_enqueued_collective"]), int(count["last_completed_collective"])
        )
        for group, count in zip(numbered, counts, strict=True)
        if not group.is_pipeline
    }


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
        _same(normalise_operation(operation.partition(" ")[0])),
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


def normalise_operation(text: str) -> str:
    """torch's word of an operation (`ALLREDUCE`, `_all_gather_base`) as `torch.distributed` calls it."""
    plain = text.strip("_").lower()
    return _OPERATIONS.get(_KIND_OF_TENSOR.sub("", plain).replace("_", ""), plain)


def _frames(found: Any) -> tuple[Frame, ...]:
    """Return the frames of Megatron and of the user's code, innermost first, at most DEEPEST_FRAMES.

    Frames of torch and of this kit's counting of calls are left out.
    """
    frames = []
    for one in found:
        file = str(one["filename"])
        if not counts_calls(file) and not any(part in file for part in _FILES_OF_TORCH):
            frames.append(_same(Frame(str(one["name"]), file, int(one["line"]))))
        if len(frames) == DEEPEST_FRAMES:
            break
    return _same(tuple(frames))


_INTERNED: dict[Any, Any] = {}


def _same[T](value: T) -> T:
    """The one object for all equal values: ranks' calls are much alike."""
    found: T = _INTERNED.setdefault(value, value)
    return found
