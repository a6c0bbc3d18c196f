"""Parameters, and what has their shape, put together from the parts that ranks hold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.records.capture import Placement, Stage, TensorRecord
from tools.verify.captured import Array, Capture, RankCapture

PARAMETERS = (
    Stage.LOCAL_GRADIENTS,
    Stage.REDUCED_GRADIENTS,
    Stage.OPTIMIZER_STATE,
    Stage.WEIGHTS,
)
"""Stages of tensors that have a parameter's shape."""
Unit = tuple[Any, ...]
"""Key of the whole parameter, offset of a layer where layers are stacked, and slot."""


@dataclass(frozen=True)
class Part:
    """A piece of a parameter on one rank."""

    one: RankCapture
    record: TensorRecord

    @property
    def placement(self) -> Placement:
        """Where it lies."""
        assert self.record.placement is not None
        return self.record.placement

    @property
    def unit(self) -> Unit:
        """Key of the whole, offset of a layer where layers are stacked, and slot."""
        place = self.placement
        stacked = len(place.global_shape) - len(self.record.shape)
        return (place.key, place.global_offset[:stacked], self.record.site.slot)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the parameter that it is a part of, of which stacked layers are no dimension."""
        return self.placement.global_shape[-len(self.record.shape) :]

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


def units(capture: Capture, stage: Stage, slot: str = "") -> dict[Unit, list[Part]]:
    """Pieces of every parameter (a layer's own where layers are stacked), by key, layer and slot.

    Args:
        capture: Of all ranks.
        stage: Of the pieces.
        slot: What the slot begins with.
    """
    found: defaultdict[Unit, list[Part]] = defaultdict(list)
    for one in capture.ranks:
        for record in one.records:
            place = record.placement
            if record.site.stage is stage and place is not None:
                if not record.site.slot.startswith(slot):
                    continue
                part = Part(one, record)
                found[part.unit].append(part)
    return dict(found)


def assembled(pieces: list[Part], capture: Capture) -> Array:
    """The whole parameter from its pieces; of local gradients what their reduction should give."""
    shape = pieces[0].whole_shape
    if len(pieces) == 1 and pieces[0].record.shape == shape and not _is_local(pieces[0]):
        return pieces[0].values()
    whole = np.zeros(shape, np.float32)
    if _is_local(pieces[0]):
        for held in local_gradients(pieces, capture):
            means = [mean for _, mean in held]
            alike = all(np.array_equal(mean, means[0]) for mean in means)
            whole[held[0][0].region()] = means[0] if alike else np.sum(means, axis=0)
        return whole
    for piece in pieces:
        values, region = piece.values(), piece.region()
        there = piece.held(values)
        whole[region][there] = values[there]
    return whole


def local_gradients(pieces: list[Part], capture: Capture) -> list[list[tuple[Part, Array]]]:
    """Of each region the means over data-parallel copies, by the other ranks that have copies of it.

    Those of other ranks either add up (a norm's, under sequence parallelism) or are each the whole.
    """
    copies: defaultdict[tuple[int, ...], list[Part]] = defaultdict(list)
    for piece in pieces:
        rank, place = piece.one.rank, piece.placement.global_offset
        copies[rank.tensor[0], rank.pipeline[0], rank.expert[0], *place].append(piece)
    # Of a loss per token each copy's gradient is a sum over its tokens.
    first = capture.first
    parts = 1 if first.per_token_loss else first.data[1] * first.context[1]
    regions: defaultdict[str, list[tuple[Part, Array]]] = defaultdict(list)
    for held in copies.values():
        total: Array = np.sum([part.values() for part in held], axis=0, dtype=np.float32)
        regions[str(held[0].region())].append((held[0], total / parts))
    return list(regions.values())


def _is_local(piece: Part) -> bool:
    return piece.record.site.stage is Stage.LOCAL_GRADIENTS
