"""`comm.json` and `memory.json`, as far as the report needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.records import COMMUNICATION_FILE, MEMORY_FILE


@dataclass(frozen=True)
class Ledgers:
    """What the ledgers say."""

    peak_memory_bytes_by_rank: Mapping[int, int] | None = None
    comm_bytes_by_rank: Mapping[int, int] | None = None
    """Bytes a rank puts on the wire in one iteration."""


def read_ledgers(folder: Path) -> tuple[Ledgers, list[str]]:
    """Read the ledgers of a run folder and what is wrong with them."""
    notes: list[str] = []
    memory = _read(folder / MEMORY_FILE, notes)
    communication = _read(folder / COMMUNICATION_FILE, notes)
    ledgers = Ledgers(
        _by_rank(memory, "peak_bytes"), _by_rank(communication, "bytes_sent_per_iteration")
    )
    return ledgers, notes


def _by_rank(document: Any, field: str) -> dict[int, int] | None:
    """`{"ranks": [{"rank": 0, field: …}, …]}` as a mapping; None where it is not there."""
    if not isinstance(document, dict) or not isinstance(document.get("ranks"), list):
        return None
    found = {
        entry["rank"]: int(entry[field])
        for entry in document["ranks"]
        if isinstance(entry, dict)
        and isinstance(entry.get("rank"), int)
        and isinstance(entry.get(field), int | float)
    }
    return found or None


def _read(path: Path, notes: list[str]) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be used ({error})")
        return None
