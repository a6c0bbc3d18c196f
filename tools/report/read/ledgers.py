"""The ledgers of a run folder, read so that a missing or damaged one is a note, not an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.records.measurements import (
    CommunicationRecord,
    MemoryRecord,
    read_communication,
    read_memory,
)
from tools.records.routing import RoutingRecord, read_routing
from tools.records.run import COMMUNICATION_FILE, MEMORY_FILE, ROUTING_FILE


@dataclass(frozen=True)
class Ledgers:
    """What the ledgers say; None where there is none."""

    memory: MemoryRecord | None = None
    communication: CommunicationRecord | None = None
    routing: RoutingRecord | None = None

    @property
    def peak_memory_bytes_by_rank(self) -> Mapping[int, int]:
        """Peak of each rank whose memory was counted."""
        return {r.rank: r.peak_bytes for r in self.memory.ranks} if self.memory else {}

    @property
    def memory_categories_by_rank(self) -> Mapping[int, Mapping[str, int]]:
        """What each rank's peak was for; sums to it."""
        if self.memory is None:
            return {}
        return {
            rank.rank: {category.value: size for category, size in rank.categories.items()}
            for rank in self.memory.ranks
        }

    @property
    def sent_bytes_by_rank(self) -> Mapping[int, int]:
        """Bytes a rank puts on the wire in a steady iteration."""
        return (
            {r.rank: r.wire_bytes for r in self.communication.ranks} if self.communication else {}
        )


def read_ledgers(folder: Path) -> tuple[Ledgers, list[str]]:
    """Read the ledgers of a run folder, and say what is wrong with them."""
    notes: list[str] = []
    memory = _read(read_memory, folder, MEMORY_FILE, notes)
    communication = _read(read_communication, folder, COMMUNICATION_FILE, notes)
    routing = _read(read_routing, folder, ROUTING_FILE, notes)
    return Ledgers(memory, communication, routing), notes


def _read[T](read: Callable[[Path], T], folder: Path, name: str, notes: list[str]) -> T | None:
    try:
        return read(folder)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        notes.append(f"{name} cannot be used ({error})")
        return None
