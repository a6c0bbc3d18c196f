"""Read the dump of a flight recorder, pickle or JSON, of torch 2.5 and later.

Nothing that a dump holds is executed.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping
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
"""Calls of a rank that are kept, the last ones: some iterations. 1,024 ranks then take less than 1 GiB."""
DEEPEST_FRAMES = 40
"""Most frames of a call that are kept."""

_PEERS = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")
_TENSOR_SUFFIX = re.compile("_(base|into_tensor|tensor)$")
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "allreducecoalesced": "all_reduce_coalesced",
    "receive": "recv",
}
"""Names of operations in `torch.distributed`, by their names in dumps and logs."""
_FILES_OF_TORCH = ("/torch/", "c10d_logger")


class UnreadableDumpError(ValueError):
    """A file with evidence that cannot be read; the message is one sentence that names the file."""


def read_dump(path: Path, evidence: RankEvidence) -> list[GroupOfRanks]:
    """Read a flight recorder dump into `evidence`: set its calls, its progress and its dump time in place.

    The dump time becomes None if the file's time is earlier than the last call.

    Returns:
        The groups that the dump describes.

    Raises:
        UnreadableDumpError: The file is truncated, foreign or hostile.
    """
    try:
        dump = _decode_dump(path.read_bytes())
        groups = _read_groups(dump.get("pg_config") or {})
        progress = _read_progress(dump.get("pg_status") or {}, groups)
        entries = sorted(dump["entries"], key=lambda entry: int(entry["record_id"]))
        kept_entries = _apply_batch_ends(entries[-KEPT_CALLS:])
        calls = tuple(_read_call(entry) for entry in kept_entries)
        dumped_ns = int(dump.get("dumped_ns") or path.stat().st_mtime_ns)
    except Exception as error:  # A hostile pickle raises anything.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableDumpError(
            f"{path} is no complete flight recorder dump ({reason}); it was left out."
        ) from error
    evidence.progress = progress
    evidence.calls = calls
    # Archives and copies change a file's time, so that it may be earlier than the last call.
    is_plausible = not calls or dumped_ns >= calls[-1].created_ns
    evidence.dumped_ns = dumped_ns if is_plausible else None
    return groups


def _decode_dump(content: bytes) -> dict[str, Any]:
    """Return the dictionary in a dump file, which is JSON or a pickle. Nothing in the pickle is executed.

    Raises:
        ValueError: The file has no list of entries. A damaged file raises other errors too.
    """
    is_json = content[:1] == b"{"
    dump = json.loads(content) if is_json else PlainUnpickler(io.BytesIO(content)).load()
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ValueError("it has no list of entries")
    return dump


def _read_groups(config: Mapping[str, Mapping[str, Any]]) -> list[GroupOfRanks]:
    """Return the groups of a dump's `pg_config`."""
    groups = []
    for key, entry in config.items():
        ranks = entry.get("ranks") or []
        rank_list = json.loads(ranks) if isinstance(ranks, str) else ranks
        # gloo's entry of the default group has no name.
        name = str(entry.get("name") or key or "0")
        description = str(entry.get("desc") or ("default_pg" if not key else ""))
        groups.append(GroupOfRanks(name, description, tuple(int(rank) for rank in rank_list)))
    return groups


def _apply_batch_ends(entries: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a dump, with the state of each batched message taken from the end of its batch.

    NCCL's recorder stores the messages of a batch, and then an entry for the end of the batch. Only the last
    entry has the correct state. Messages of a batch without an end entry were not sent, so they are left out.
    """
    copied_entries = [dict(entry) for entry in entries]
    open_batches: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for entry in copied_entries:
        group_name = str(entry["process_group"][0])
        batch_key = (group_name, int(entry["p2p_seq_id"]))
        is_end = str(entry["profiling_name"]).endswith(":coalesced")
        # The end of a batch of collectives has a number among collectives, and needs no change.
        is_end_of_messages = is_end and not entry["collective_seq_id"]
        if is_end_of_messages:
            entry["is_p2p"] = True
            for message in open_batches.pop(batch_key, []):
                message["state"] = entry.get("state")
                message["retired"] = entry.get("retired")
        elif entry.get("is_p2p") and not is_end:
            open_batches.setdefault(batch_key, []).append(entry)
    # Two messages may have equal entries, so that unsent ones are recognised by their identity.
    unsent_ids: set[int] = set()
    for batch in open_batches.values():
        unsent_ids.update(id(message) for message in batch if _is_batched_message(message))
    return [entry for entry in copied_entries if id(entry) not in unsent_ids]


def _is_batched_message(entry: Mapping[str, Any]) -> bool:
    """Return True if `batch_isend_irecv` made the entry's call."""
    return any(frame["name"] == "batch_isend_irecv" for frame in entry.get("frames") or ())


def _read_progress(
    status: Mapping[str, Mapping[str, Any]], groups: list[GroupOfRanks]
) -> dict[str, Progress]:
    """Return NCCL's counts of collectives by group name; empty if the counts cannot be assigned to groups.

    NCCL has its own numbers for groups, which are in the same order as those of torch. Pipeline groups are left
    out, because NCCL also counts their point-to-point messages.
    """
    numbered_groups = [group for group in groups if group.name.isdecimal()]
    if len(numbered_groups) != len(status):
        return {}
    numbered_groups.sort(key=lambda group: int(group.name))
    counts_in_order = (status[number] for number in sorted(status, key=int))
    return {
        group.name: Progress(
            entered=int(counts["last_enqueued_collective"]),
            completed=int(counts["last_completed_collective"]),
        )
        for group, counts in zip(numbered_groups, counts_in_order, strict=True)
        if not group.is_pipeline
    }


def _read_call(entry: Mapping[str, Any]) -> RecordedCall:
    """Return the call of one entry of a dump."""
    group, description = entry["process_group"]
    title = str(entry["profiling_name"])
    # A title is `nccl:all_reduce`, or `nccl:send 0->1`.
    operation = title.partition(":")[2] or title
    peer = _PEERS.match(operation)
    is_point_to_point = bool(entry.get("is_p2p"))
    number = entry["p2p_seq_id"] if is_point_to_point else entry["collective_seq_id"]
    input_sizes = entry.get("input_sizes") or ()
    sizes = tuple(tuple(int(length) for length in size) for size in input_sizes)
    dtypes = tuple(str(dtype) for dtype in entry.get("input_dtypes") or ())
    state = entry.get("state")
    return RecordedCall(
        group=_intern(str(group)),
        description=_intern(str(description)),
        operation=_intern(normalise_operation(operation.partition(" ")[0])),
        number=int(number),
        sizes=_intern(sizes),
        dtypes=_intern(dtypes),
        created_ns=int(entry["time_created_ns"]),
        is_done=bool(entry.get("retired")) or state == "completed",
        is_started=state == "started",
        is_point_to_point=is_point_to_point or peer is not None,
        peer=int(peer[1]) if peer else None,
        frames=_read_frames(entry.get("frames") or ()),
    )


def normalise_operation(text: str) -> str:
    """Return the name that `torch.distributed` has for an operation of a dump or log.

    `ALLREDUCE` becomes `all_reduce`, and `_all_gather_base` becomes `all_gather`. The name of an unknown
    operation is returned in lower case.
    """
    plain = text.strip("_").lower()
    return _OPERATIONS.get(_TENSOR_SUFFIX.sub("", plain).replace("_", ""), plain)


def select_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the frames of Megatron and of the user's code, innermost first, at most DEEPEST_FRAMES.

    Frames of torch and of the code that counts communication calls are left out.
    """
    selected = []
    for frame in frames:
        if not counts_calls(frame.file) and not any(part in frame.file for part in _FILES_OF_TORCH):
            selected.append(_intern(frame))
        if len(selected) == DEEPEST_FRAMES:
            break
    return _intern(tuple(selected))


def _read_frames(entries: Any) -> tuple[Frame, ...]:
    """Return the frames of a dump's call that `select_frames` keeps."""
    return select_frames(
        Frame(str(entry["name"]), str(entry["filename"]), int(entry["line"])) for entry in entries
    )


_INTERNED: dict[Any, Any] = {}


def _intern[T](value: T) -> T:
    """Return one shared object for all equal values, because most calls of all ranks have equal values."""
    shared: T = _INTERNED.setdefault(value, value)
    return shared
