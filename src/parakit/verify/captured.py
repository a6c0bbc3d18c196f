"""A capture as it is read back: every rank's tensors as arrays, without loading them all.

Parameters, and what has their shape, are put together from the parts that ranks hold.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.capture import (
    RESPONSES_FILE,
    TENSORS_FILE,
    CapturedModule,
    CapturedRank,
    Placement,
    Site,
    Stage,
    TensorRecord,
    read_index,
    read_rank,
)

Array = NDArray[Any]
_LAYER = re.compile(r"decoder\.layers\.(\d+)")
_SHORTLY = 1e-6
PARAMETERS = (
    Stage.LOCAL_GRADIENTS,
    Stage.REDUCED_GRADIENTS,
    Stage.OPTIMIZER_STATE,
    Stage.WEIGHTS,
)
"""Stages of tensors that have a parameter's shape."""
ParameterKey = tuple[Any, ...]
"""Key of the whole parameter, offset of a layer where layers are stacked, and slot."""


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
                of_whole = (stage, full_parameter_name(name), slot)
                found[of_whole] = max(value, found.get(of_whole, 0.0))
        return found

    @cached_property
    def largest_gradient(self) -> float:
        """Absolute value, of all reduced gradients; infinite if one is not finite."""
        found = 0.0
        for pieces in group_parameter_parts(self, Stage.REDUCED_GRADIENTS).values():
            for piece in pieces:
                values = piece.values()
                most = float(np.abs(values[piece.held(values)]).max(initial=0.0))
                found = max(found, most if np.isfinite(most) else np.inf)
        return found

    def notes(self) -> Iterator[str]:
        """What ranks could not capture, each once."""
        yield from dict.fromkeys(note for one in self.ranks for note in one.rank.notes)


@dataclass(frozen=True)
class ParameterPart:
    """A piece of a parameter on one rank."""

    one: RankCapture
    record: TensorRecord

    @property
    def placement(self) -> Placement:
        """Where it lies."""
        assert self.record.placement is not None
        return self.record.placement

    @property
    def unit(self) -> ParameterKey:
        """Key of the whole, offset of a layer where layers are stacked, and slot."""
        place = self.placement
        stacked = len(place.global_shape) - len(self.record.shape)
        return (place.key, place.global_offset[:stacked], self.record.site.slot)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the parameter that it is a part of, of which stacked layers are no dimension."""
        return self.placement.global_shape[-len(self.record.shape) :]

    @property
    def name(self) -> str:
        """Of the whole parameter."""
        return full_parameter_name(self.record.site.name)

    def values(self) -> Array:
        """Its values; NaN for elements of another rank's shard."""
        return self.one.values(self.record)

    def held(self, values: Array) -> Array:
        """Which of the elements are this rank's."""
        if not self.placement.partial:
            return np.ones(values.shape, bool)
        return np.isfinite(values)

    def region(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        offsets = self.placement.global_offset[-len(self.record.shape) :]
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(offsets, self.record.shape, strict=True)
        )


def group_parameter_parts(
    capture: Capture, stage: Stage, slot: str = ""
) -> dict[ParameterKey, list[ParameterPart]]:
    """Pieces of every parameter (a layer's own where layers are stacked), by key, layer and slot.

    Those whose slot begins so.
    """
    found: defaultdict[ParameterKey, list[ParameterPart]] = defaultdict(list)
    for one in capture.ranks:
        for record in one.records:
            place = record.placement
            if record.site.stage is stage and place is not None:
                if not record.site.slot.startswith(slot):
                    continue
                part = ParameterPart(one, record)
                found[part.unit].append(part)
    return dict(found)


def assemble_parameter(pieces: list[ParameterPart], capture: Capture) -> Array:
    """The whole parameter from its pieces; of local gradients what their reduction should give."""
    first, shape = pieces[0], pieces[0].whole_shape
    is_local = first.record.site.stage is Stage.LOCAL_GRADIENTS
    if len(pieces) == 1 and first.record.shape == shape and not is_local:
        return first.values()
    whole = np.zeros(shape, np.float32)
    if is_local:
        for held in average_local_gradients(pieces, capture):
            means = [mean for _, mean in held]
            alike = all(np.array_equal(mean, means[0]) for mean in means)
            whole[held[0][0].region()] = means[0] if alike else np.sum(means, axis=0)
        return whole
    for piece in pieces:
        values, region = piece.values(), piece.region()
        there = piece.held(values)
        whole[region][there] = values[there]
    return whole


def assemble_region(
    pieces: list[ParameterPart], capture: Capture, region: tuple[slice, ...], shape: tuple[int, ...]
) -> Array | None:
    """A region of the whole parameter; None where it has not this shape."""
    whole = assemble_parameter(pieces, capture)
    found = whole[region] if whole.ndim == len(shape) else whole
    return found if found.shape == shape else None


def average_local_gradients(
    pieces: list[ParameterPart], capture: Capture
) -> list[list[tuple[ParameterPart, Array]]]:
    """Of each region the means over data-parallel copies, by the other ranks that have copies of it.

    Those of other ranks either add up (a norm's, under sequence parallelism) or are each the whole.
    """
    copies: defaultdict[tuple[int, ...], list[ParameterPart]] = defaultdict(list)
    for piece in pieces:
        rank, place = piece.one.rank, piece.placement.global_offset
        copies[rank.tensor[0], rank.pipeline[0], rank.expert[0], *place].append(piece)
    # Of a loss per token each copy's gradient is a sum over its tokens.
    first = capture.first
    parts = 1 if first.per_token_loss else first.data[1] * first.context[1]
    regions: defaultdict[str, list[tuple[ParameterPart, Array]]] = defaultdict(list)
    for held in copies.values():
        total: Array = np.sum([part.values() for part in held], axis=0, dtype=np.float32)
        regions[str(held[0].region())].append((held[0], total / parts))
    return list(regions.values())


def full_parameter_name(name: str) -> str:
    """A parameter's name without the number of a part that checkpoints hold apart, as of a gated MLP."""
    return name.partition("[")[0]


def encode_tensor(values: Array, dtype: str) -> memoryview:
    """A tensor's bytes in a type of the capture, as a `CaptureWriter` takes them."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        stored: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        stored = np.ascontiguousarray(values, np.dtype(dtype))
    return memoryview(stored.ravel().view(np.uint8))


def order_sites(capture: Capture) -> list[Site]:
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
        begins: dict[int | None, int] = {}  # The first of layers that follow one another, by each.
        for layer in sorted({n for site in sites if (n := _layer(site.name)) is not None}):
            begins[layer] = begins.get(layer - 1, layer)
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
