"""A capture as it is read back: every rank's tensors as arrays, without loading them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tools.records.capture import (
    RESPONSES_FILE,
    TENSORS_FILE,
    CapturedRank,
    Site,
    TensorRecord,
    read_index,
    read_rank,
)

Array = NDArray[Any]


class VerifyError(ValueError):
    """Two captures cannot be compared; the message says why and what to do."""


@dataclass(frozen=True)
class RankCapture:
    """One rank's tensors."""

    folder: Path
    rank: CapturedRank
    records: tuple[TensorRecord, ...]
    """In the order in which they were computed."""

    @cached_property
    def by_site(self) -> dict[Site, TensorRecord]:
        """The first record of each site."""
        found: dict[Site, TensorRecord] = {}
        for record in self.records:
            found.setdefault(record.site, record)
        return found

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        path = self.folder / TENSORS_FILE
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(path, mode="r")

    def stored(self, record: TensorRecord) -> bytes:
        """A tensor bit for bit."""
        return self._bytes[record.offset_bytes : record.offset_bytes + record.size_bytes].tobytes()

    def values(self, record: TensorRecord) -> Array:
        """A tensor's values; floating-point ones as float32 or float64."""
        stored = self._bytes[record.offset_bytes : record.offset_bytes + record.size_bytes]
        if record.dtype == "bfloat16":
            wide = stored.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(record.shape)
        values = stored.view(np.dtype(record.dtype)).reshape(record.shape)
        return values.astype(np.float32) if record.dtype == "float16" else values


@dataclass(frozen=True)
class Capture:
    """One run's tensors of one iteration."""

    folder: Path
    ranks: tuple[RankCapture, ...]

    @property
    def first(self) -> CapturedRank:
        """Rank 0's description, for what all ranks share."""
        return self.ranks[0].rank

    def responses(self) -> dict[tuple[str, str, str], float]:
        """Largest relative change of each tensor, by stage, name and slot, that was measured."""
        found: dict[tuple[str, str, str], float] = {}
        for one in self.ranks:
            path = one.folder / RESPONSES_FILE
            for key, value in msgspec.json.decode(path.read_bytes()).items():
                stage, name, slot = key.split("|")
                of_whole = (stage, whole_name(name), slot)
                found[of_whole] = max(value, found.get(of_whole, 0.0))
        return found

    def notes(self) -> Iterator[str]:
        """What ranks could not capture, each once."""
        yield from dict.fromkeys(note for one in self.ranks for note in one.rank.notes)


def whole_name(name: str) -> str:
    """A parameter's name without the number of a part that checkpoints hold apart, as of a gated MLP."""
    return name.partition("[")[0]


def read_capture(folder: Path) -> Capture:
    """Read a capture.

    Raises:
        VerifyError: It is not there, or a rank's part was cut off.
    """
    folders = sorted(folder.glob("rank-*"), key=lambda path: int(path.name.removeprefix("rank-")))
    if not folders:
        raise VerifyError(
            f"{folder} holds no captured tensors; the run ended before the iteration."
        )
    try:
        ranks = [RankCapture(path, read_rank(path), tuple(read_index(path))) for path in folders]
    except FileNotFoundError as error:
        raise VerifyError(
            f"The capture {folder} was cut off ({Path(error.filename).parent.name} did not finish); "
            "run it again."
        ) from None
    expected = ranks[0].rank.world_size
    if len(ranks) != expected:
        raise VerifyError(
            f"The capture {folder} holds {len(ranks)} of {expected} ranks; run it again."
        )
    return Capture(folder, tuple(ranks))
