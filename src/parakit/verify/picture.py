"""A tensor's difference from the reference as a picture of rows and columns.

The colour of an element is its difference over the root mean square of the reference, on a logarithmic
scale: blue below the tolerance, red above. Both are more or less opaque on a transparent ground, so that
one picture serves a light and a dark page.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from parakit.formatting.units import DASH, count
from parakit.verify.captured import Array
from parakit.verify.comparison import ComparedTensor

MOST_POINTS = 512
"""Of the picture's sides."""
_TINY = 16
"""Elements up to which a table says more than a picture."""
_CALM, _RED = (9, 105, 218), (207, 34, 46)
_CALM_DECADES = 3
_SIDE, _THIN = 560, 64
"""CSS pixels: the longer side of a picture, and the least of the shorter."""


class Axis(NamedTuple):
    """One side of a picture."""

    text: str
    length: int
    """Rows or columns of the tensor."""

    @property
    def ticks(self) -> tuple[int, ...]:
        """Where the side is halved and quartered: where a rank's part would begin or end."""
        parts = min(4, self.length)
        return tuple(dict.fromkeys(self.length * part // parts for part in range(parts + 1)))


@dataclass(frozen=True)
class Picture:
    """The difference of two tensors of the same shape."""

    pair: ComparedTensor
    tolerance: float

    @cached_property
    def relative(self) -> Array:
        """Each element's difference over the reference's root mean square; of integers 1 or 0."""
        ours, reference = self.pair.ours, self.pair.reference
        if not np.issubdtype(ours.dtype, np.floating):
            return np.asarray(ours != reference, np.float32)
        size = _rms(reference) or _rms(ours) or 1.0
        with np.errstate(invalid="ignore"):
            found = np.abs(ours - reference) / ours.dtype.type(size)
        return np.where((ours == reference) | (np.isnan(ours) & np.isnan(reference)), 0.0, found)

    @cached_property
    def matrix(self) -> Array:
        """The differences in rows and columns."""
        values = self.relative
        if values.ndim < 2:
            return values.reshape(1, -1)
        if self._swapped:
            values = values.swapaxes(0, 1)
        return values.reshape(-1, values.shape[-1])

    @property
    def _swapped(self) -> bool:
        """Sequence, batch, hidden: each sequence is drawn on its own, not the batch interleaved."""
        shape = self.relative.shape
        return len(shape) == 3 and 1 < shape[1] < shape[0]

    @property
    def largest(self) -> float:
        """The largest difference of an element that is finite."""
        finite = self.relative[np.isfinite(self.relative)]
        return float(finite.max()) if finite.size else 0.0

    @property
    def is_drawn(self) -> bool:
        """Whether there is enough to draw."""
        return self.relative.size > _TINY

    @property
    def data_uri(self) -> str:
        """The picture as PNG."""
        from matplotlib.image import imsave

        buffer = io.BytesIO()
        matrix = self.matrix
        for axis in (0, 1):  # More rows or columns are drawn as the largest of a block.
            starts = np.arange(0, matrix.shape[axis], -(-matrix.shape[axis] // MOST_POINTS))
            matrix = np.maximum.reduceat(matrix, starts, axis=axis)
        points = _coloured(matrix, self.tolerance, self.largest)
        imsave(buffer, points, format="png", pil_kwargs={"optimize": True})
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    @property
    def sides(self) -> tuple[int, int]:
        """Width and height on a wide page, in CSS pixels."""
        rows, columns = self.matrix.shape
        longer = max(rows, columns)
        return max(_THIN, _SIDE * columns // longer), max(_THIN, _SIDE * rows // longer)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Rows, and columns."""
        shape = self.relative.shape
        rows, columns = self.matrix.shape
        names = [f"dimension {place} ({size})" for place, size in enumerate(shape)]
        leading = names[:-1]
        if self._swapped:
            leading = [names[1], names[0]]
        return (
            Axis(" × ".join(leading) or "one row", rows),
            Axis(names[-1] if names else "one element", columns),
        )

    @property
    def extent(self) -> str:
        """How many elements are wrong, and the least rows and columns that hold them."""
        wrong = ~(self.matrix <= self.tolerance)
        total = int(wrong.sum())
        if not total:
            return "No element alone differs by more than the tolerance."
        rows, columns = np.flatnonzero(wrong.any(1)), np.flatnonzero(wrong.any(0))
        return (
            f"{count(total)} of {count(wrong.size)} elements ({total / wrong.size:.1%}) differ by more"
            f" than the tolerance, all within rows {rows[0]}–{rows[-1]} of {len(wrong)}, columns"
            f" {columns[0]}–{columns[-1]} of {wrong.shape[1]}."
        )

    def worst(self, most: int = 6) -> Iterator[tuple[str, str, str]]:
        """The elements that differ most, all of a tiny tensor: index, ours, the reference's."""
        if not self.relative.size:
            return
        flat = np.nan_to_num(self.relative, nan=np.inf).ravel()
        order = np.arange(flat.size)
        if self.is_drawn:  # Not all of a large tensor is sorted.
            largest = np.argpartition(flat, -most)[-most:]
            order = largest[np.argsort(-flat[largest], kind="stable")]
        for place in order:
            index = np.unravel_index(int(place), self.relative.shape)
            ours, reference = self.pair.ours[index], self.pair.reference[index]
            where = ", ".join(str(int(one)) for one in index) or DASH
            yield where, f"{ours:.7g}", f"{reference:.7g}"


def describe_range(values: Array) -> str:
    """Least and largest value, and the root mean square."""
    if not values.size:
        return "empty"
    if not np.issubdtype(values.dtype, np.floating):
        return f"{values.min()} to {values.max()}"
    finite = values[np.isfinite(values)]
    lost = values.size - finite.size
    text = f"{count(lost)} not finite" if lost else ""
    if not finite.size:
        return text
    text = f", {text}" if text else ""
    return f"{finite.min():.4g} to {finite.max():.4g}, rms {_rms(finite):.4g}{text}"


def _rms(values: Array) -> float:
    finite = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _coloured(matrix: Array, tolerance: float, largest: float) -> Array:
    """Red, green, blue and opacity of each element; in steps, which compress well."""
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(matrix / tolerance) if tolerance else np.where(matrix > 0, 1.0, -np.inf)
    span = max(np.log10(largest / tolerance), 1.0) if tolerance and largest else 1.0
    wrong = ~(matrix <= tolerance)
    calm = np.clip(1 + decades / _CALM_DECADES, 0, 1)
    red = np.clip(np.nan_to_num(decades, nan=span, posinf=span, neginf=0) / span, 0, 1)
    opacity = np.where(wrong, 0.25 + 0.75 * red, np.nan_to_num(calm, neginf=0) * 0.3)
    found = np.empty((*matrix.shape, 4), np.uint8)
    found[..., :3] = np.where(wrong[..., None], _RED, _CALM)
    found[..., 3] = np.round(np.round(opacity * 48) / 48 * 255)
    return found
