"""Draw a tensor's difference from the reference as a picture of rows and columns.

The colour of an element is its absolute difference over the root mean square of the reference, on a
logarithmic scale: blue up to the tolerance, red above. Both colours vary in opacity on a transparent
ground, so that one picture serves a light and a dark page.
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

MAX_PIXELS = 512
"""Largest number of pixels per side of the picture."""
_MAX_TABLE_ELEMENTS = 16
"""Largest number of elements that are shown as a table and not drawn."""
_RIGHT_COLOUR, _WRONG_COLOUR = (9, 105, 218), (207, 34, 46)
"""Blue and red as red, green and blue from 0 to 255."""
_RIGHT_DECADES = 3
"""Powers of ten below the tolerance over which blue fades to nothing."""
_LONGER_SIDE, _MIN_SHORTER_SIDE = 560, 64
"""Sizes of the picture on the page, in CSS pixels."""
_OPACITY_STEPS = 48
"""Number of distinct opacities. PNG compresses few distinct values well."""


class Axis(NamedTuple):
    """One side of a picture."""

    text: str
    """Dimensions of the tensor along this side."""
    length: int
    """Rows or columns of the tensor."""

    @property
    def ticks(self) -> tuple[int, ...]:
        """Positions that quarter the side, at which a rank's part would begin or end."""
        num_parts = min(4, self.length)
        return tuple(
            dict.fromkeys(self.length * part // num_parts for part in range(num_parts + 1))
        )


@dataclass(frozen=True)
class Picture:
    """Picture of the difference between a rank's tensor and the reference's part of the same shape."""

    pair: ComparedTensor
    tolerance: float

    @cached_property
    def relative(self) -> Array:
        """Absolute difference of each element over the reference's root mean square.

        Integers and truth values have the difference 1 or 0. Elements that are equal, or NaN in both tensors,
        have the difference 0. If the reference is zero, the root mean square of our tensor is used.
        """
        ours, reference = self.pair.ours, self.pair.reference
        if not np.issubdtype(ours.dtype, np.floating):
            return np.asarray(ours != reference, np.float32)
        scale = _root_mean_square(reference) or _root_mean_square(ours) or 1.0
        with np.errstate(invalid="ignore"):
            differences = np.abs(ours - reference) / ours.dtype.type(scale)
        is_equal = (ours == reference) | (np.isnan(ours) & np.isnan(reference))
        return np.where(is_equal, 0.0, differences)

    @cached_property
    def matrix(self) -> Array:
        """Relative differences as a matrix. The last dimension gives the columns, all other dimensions give the rows.

        A vector is one row. If the sequence is the first dimension and the batch the second, the rows are
        ordered by sample.
        """
        values = self.relative
        if values.ndim < 2:
            return values.reshape(1, -1)
        if self._is_sequence_first:
            values = values.swapaxes(0, 1)
        return values.reshape(-1, values.shape[-1])

    @property
    def _is_sequence_first(self) -> bool:
        """True if the dimensions are sequence, batch and hidden size, judged by their sizes.

        Rows of such a tensor are ordered by sample, so that each sequence is drawn in one piece.
        """
        shape = self.relative.shape
        return len(shape) == 3 and 1 < shape[1] < shape[0]

    @property
    def largest(self) -> float:
        """Largest finite difference; 0 if there is none."""
        finite = self.relative[np.isfinite(self.relative)]
        return float(finite.max()) if finite.size else 0.0

    @property
    def is_drawn(self) -> bool:
        """True if the tensor has more elements than a table shows."""
        return self.relative.size > _MAX_TABLE_ELEMENTS

    @property
    def data_uri(self) -> str:
        """PNG of the picture as a data URI. If a pixel stands for several elements, their largest difference
        colours it.
        """
        from matplotlib.image import imsave

        buffer = io.BytesIO()
        matrix = self.matrix
        for axis in (0, 1):
            size = matrix.shape[axis]
            elements_per_pixel = -(-size // MAX_PIXELS)
            starts = np.arange(0, size, elements_per_pixel)
            matrix = np.maximum.reduceat(matrix, starts, axis=axis)
        pixels = _colour_elements(matrix, self.tolerance, self.largest)
        imsave(buffer, pixels, format="png", pil_kwargs={"optimize": True})
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

    @property
    def sides(self) -> tuple[int, int]:
        """Width and height on a wide page, in CSS pixels."""
        rows, columns = self.matrix.shape
        longer = max(rows, columns)
        width = max(_MIN_SHORTER_SIDE, _LONGER_SIDE * columns // longer)
        height = max(_MIN_SHORTER_SIDE, _LONGER_SIDE * rows // longer)
        return width, height

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Axis of the rows and axis of the columns, in this order."""
        shape = self.relative.shape
        rows, columns = self.matrix.shape
        names = [f"dimension {index} ({size})" for index, size in enumerate(shape)]
        row_names = [names[1], names[0]] if self._is_sequence_first else names[:-1]
        return (
            Axis(" × ".join(row_names) or "one row", rows),
            Axis(names[-1] if names else "one element", columns),
        )

    @property
    def extent(self) -> str:
        """Sentence with the number of wrong elements and the rows and columns that hold them."""
        is_wrong = ~(self.matrix <= self.tolerance)
        num_wrong = int(is_wrong.sum())
        if not num_wrong:
            return "No element alone differs by more than the tolerance."
        num_rows, num_columns = is_wrong.shape
        rows, columns = np.flatnonzero(is_wrong.any(1)), np.flatnonzero(is_wrong.any(0))
        return (
            f"{count(num_wrong)} of {count(is_wrong.size)} elements"
            f" ({num_wrong / is_wrong.size:.1%}) differ by more than the tolerance, all within rows"
            f" {rows[0]}–{rows[-1]} of {num_rows}, columns {columns[0]}–{columns[-1]} of {num_columns}."
        )

    def worst(self, max_elements: int = 6) -> Iterator[tuple[str, str, str]]:
        """Yield index, our value and the reference's value of the elements that differ most, as text.

        The largest difference comes first. If the tensor is too small to be drawn, all its elements are yielded
        in their order, and `max_elements` is ignored.
        """
        if not self.relative.size:
            return
        differences = np.nan_to_num(self.relative, nan=np.inf).ravel()
        order = np.arange(differences.size)
        if self.is_drawn:
            # Sorting all elements of a large tensor would take long, so the largest are selected first.
            largest = np.argpartition(differences, -max_elements)[-max_elements:]
            order = largest[np.argsort(-differences[largest], kind="stable")]
        for flat_index in order:
            index = np.unravel_index(int(flat_index), self.relative.shape)
            ours, reference = self.pair.ours[index], self.pair.reference[index]
            index_text = ", ".join(str(int(number)) for number in index) or DASH
            yield index_text, f"{ours:.7g}", f"{reference:.7g}"


def describe_range(values: Array) -> str:
    """Return the least and the largest value, the root mean square, and the count of non-finite values.

    The root mean square is left out for integers. A tensor without elements gives the text `empty`.
    """
    if not values.size:
        return "empty"
    if not np.issubdtype(values.dtype, np.floating):
        return f"{values.min()} to {values.max()}"
    finite = values[np.isfinite(values)]
    num_not_finite = values.size - finite.size
    not_finite = f"{count(num_not_finite)} not finite" if num_not_finite else ""
    if not finite.size:
        return not_finite
    suffix = f", {not_finite}" if not_finite else ""
    rms = _root_mean_square(finite)
    return f"{finite.min():.4g} to {finite.max():.4g}, rms {rms:.4g}{suffix}"


def _root_mean_square(values: Array) -> float:
    """Return the root mean square of the finite values; 0 if there is none."""
    finite = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _colour_elements(matrix: Array, tolerance: float, largest: float) -> Array:
    """Return red, green, blue and opacity of each element, [rows, columns, 4], from 0 to 255.

    Elements above the tolerance are red, and most opaque at the `largest` difference. Other elements are
    blue, and most opaque at the tolerance. A difference that is not finite is as red as the largest.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        decades = np.log10(matrix / tolerance) if tolerance else np.where(matrix > 0, 1.0, -np.inf)
    has_span = tolerance and largest
    largest_decades = max(np.log10(largest / tolerance), 1.0) if has_span else 1.0
    is_wrong = ~(matrix <= tolerance)
    finite_decades = np.nan_to_num(decades, nan=largest_decades, posinf=largest_decades, neginf=0)
    red = np.clip(finite_decades / largest_decades, 0, 1)
    blue = np.nan_to_num(np.clip(1 + decades / _RIGHT_DECADES, 0, 1), neginf=0)
    opacity = np.where(is_wrong, 0.25 + 0.75 * red, blue * 0.3)
    pixels = np.empty((*matrix.shape, 4), np.uint8)
    pixels[..., :3] = np.where(is_wrong[..., None], _WRONG_COLOUR, _RIGHT_COLOUR)
    pixels[..., 3] = np.round(np.round(opacity * _OPACITY_STEPS) / _OPACITY_STEPS * 255)
    return pixels
