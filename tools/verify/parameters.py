"""Parameters, and what has their shape, put together from the parts that ranks hold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.records.capture import Placement, Stage, TensorRecord
from tools.verify.captured import Array, Capture, RankCapture

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
                stacked = len(place.global_shape) - len(record.shape)
                unit = (place.key, place.global_offset[:stacked], record.site.slot)
                found[unit].append(Part(one, record))
    return dict(found)


def assembled(pieces: list[Part], capture: Capture) -> Array:
    """The whole parameter from its pieces; local gradients of copies are averaged."""
    shape = pieces[0].whole_shape
    if len(pieces) == 1 and pieces[0].record.shape == shape:
        return pieces[0].values()
    whole = np.zeros(shape, np.float32)
    for piece in pieces:
        values, region = piece.values(), piece.region()
        if piece.record.site.stage is Stage.LOCAL_GRADIENTS:
            whole[region] += values / (capture.first.data[1] * capture.first.context[1])
        else:
            there = piece.held(values)
            whole[region][there] = values[there]
    return whole
