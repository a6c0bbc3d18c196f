"""A capture as it is read back: every rank's tensors as arrays, without loading them all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    CapturedModule,
    CapturedRank,
    Site,
    Stage,
    TensorRecord,
    read_index,
    read_rank,
)

Array = NDArray[Any]
_LAYER = re.compile(r"decoder\.layers\.(\d+)")
_SHORTLY = 1e-6


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

    def changes(self, file: str) -> dict[tuple[str, str, str], float]:
        """Of tensors when the iteration was repeated, by stage, name and slot."""
        changed: dict[str, float] = msgspec.json.decode((self.folder / file).read_bytes())
        return {tuple(key.split("|")): value for key, value in changed.items()}  # type: ignore[misc]

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

    @property
    def modules(self) -> dict[str, CapturedModule]:
        """Of all ranks, by name."""
        return {name: one for there in self.ranks for name, one in there.rank.modules.items()}

    def responses(self) -> dict[tuple[str, str, str], float]:
        """Largest relative change of each tensor, by stage, name and slot, that was measured."""
        found: dict[tuple[str, str, str], float] = {}
        for one in self.ranks:
            for (stage, name, slot), value in one.changes(RESPONSES_FILE).items():
                of_whole = (stage, whole_name(name), slot)
                found[of_whole] = max(value, found.get(of_whole, 0.0))
        return found

    def notes(self) -> Iterator[str]:
        """What ranks could not capture, each once."""
        yield from dict.fromkeys(note for one in self.ranks for note in one.rank.notes)


def whole_name(name: str) -> str:
    """A parameter's name without the number of a part that checkpoints hold apart, as of a gated MLP."""
    return name.partition("[")[0]


def as_stored(values: Array, dtype: str) -> Array:
    """A tensor's values in a type of the capture, one after another."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).ravel()
    return np.ascontiguousarray(values, np.dtype(dtype)).ravel()


def sites_in_order(capture: Capture) -> list[Site]:
    """Every tensor, without its micro batches, in the order in which one rank would compute them.

    Layers that follow one another on a rank are a chunk; chunks follow one another over the ranks of a
    pipeline, backward the other way. What a later rank of a stage alone has, such as its experts, stands
    before what follows there, after what the earlier ranks have.
    """
    places: dict[Site, tuple[int, float, float]] = {}
    seen: set[int] = set()
    for one in capture.ranks:
        sites = dict.fromkeys(
            msgspec.structs.replace(record.site, micro_batch=None) for record in one.records
        )
        begins = _chunks(site.name for site in sites)
        is_later = one.rank.pipeline[0] in seen
        seen.add(one.rank.pipeline[0])
        for order, stage in enumerate(Stage):
            last, of_stage = -1.0, [site for site in sites if site.stage is stage]
            back = stage is Stage.ACTIVATION_GRADIENTS
            numbers = [begins.get(_layer(site.name)) for site in of_stage]
            chunk = next((-n if back else n for n in numbers if n is not None), 0) - 0.5
            shortly_before = _shortly_before(of_stage, places) if is_later else {}
            for site, number in zip(of_stage, numbers, strict=True):
                if number is not None:
                    chunk = -number if back else number
                place = shortly_before.get(site, last + (_SHORTLY if is_later else 1.0))
                last = places.setdefault(site, (order, chunk, place))[2]
    return sorted(places, key=places.__getitem__)


def _shortly_before(
    sites: Sequence[Site], places: Mapping[Site, tuple[int, float, float]]
) -> dict[Site, float]:
    """Places for sites that have none yet and are followed by one that has."""
    found: dict[Site, float] = {}
    following: float | None = None
    for site in reversed(sites):
        if site in places:
            following = places[site][2]
        elif following is not None:
            following = found[site] = following - _SHORTLY
    return found


def _chunks(names: Iterable[str]) -> dict[int | None, int]:
    """The first of the layers that follow one another on a rank, by each of them."""
    first: dict[int | None, int] = {}
    for layer in sorted({one for name in names if (one := _layer(name)) is not None}):
        first[layer] = first.get(layer - 1, layer)
    return first


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None


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
