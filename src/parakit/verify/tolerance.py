"""How far a tensor may be off, relative: a few times its response, and never less than a sum rounds.

The response is the tensor's change when every weight of the reference, and all that its modules are
given, changes by one rounding error. Where that is large all else is asked: a router takes the best
experts, and two of them may be equal within rounding; Adam divides a gradient by its size, so that an
element whose gradient is all rounding moves as far as any other, either way.
"""

from __future__ import annotations

import numpy as np

from parakit.artifacts.capture import (
    BUFFER,
    START_BUFFER,
    START_WEIGHT,
    UPDATE,
    Stage,
    TensorRecord,
)
from parakit.verify.captured import PARAMETERS, Array, Capture
from parakit.verify.comparison import ComparisonKey

RESPONSES = 6.0
"""Times its response that a tensor may be off. Healthy strategies stay below 2 (README,
bench-verify)."""
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_NORM_TERMS = 64
"""A norm is a sum over all parameters, but of squares: its rounding is that of a short sum."""
_AS = {START_WEIGHT: UPDATE, START_BUFFER: BUFFER}
"""Slots whose response is that of another."""


class Tolerances:
    """Of every tensor, as a reference's responses give it."""

    def __init__(self, reference: Capture) -> None:
        self._reference = reference
        self._responses = reference.responses()
        self._squared = {name for _, name, slot in self._responses if slot == "exp_avg_sq"}
        # The largest response by slot of weights whose optimizer keeps no square of the gradient. Muon
        # computes in bf16: a rounding error of fp32 changes the update of some matrices by a
        # hundredth, and of others not at all.
        self._of_matrices: dict[str, float] = {}
        for (stage, name, slot), response in self._responses.items():
            if stage == Stage.WEIGHTS and name not in self._squared:
                self._of_matrices[slot] = max(self._of_matrices.get(slot, 0.0), response)

    def of(self, key: ComparisonKey, like: TensorRecord) -> float:
        """Of a tensor like this; 0 for integers and truth values."""
        if not like.dtype.startswith(("float", "bfloat")):
            return 0.0
        first = self._reference.first
        terms = max((*like.shape, _NORM_TERMS if key[0] is Stage.NORM else 1))
        if key[0] in PARAMETERS:
            terms = first.sequence_length * first.micro_batch_size * first.micro_batches
        epsilon = EPSILON.get(first.dtype, EPSILON["float32"])
        rounding = epsilon * float(np.sqrt(terms))
        if key[0] is Stage.LOSS:
            # A sum over tokens, of which a few changes may see next to nothing.
            tokens = first.sequence_length * first.micro_batch_size
            rounding = max(rounding, EPSILON["float32"] * float(np.sqrt(tokens)))
        of = (key[0], key[1], _AS.get(key[2], key[2]))
        response = self._responses.get(of, 0.0)
        if key[0] is Stage.WEIGHTS and key[1] not in self._squared:
            response = max(response, self._of_matrices.get(of[2], 0.0))
        tolerance = RESPONSES * max(response, rounding / 4)
        if key[2].endswith(UPDATE) and tolerance >= 1:
            # Of the worst row all may be rounding: it points anywhere, and is larger or smaller.
            return max(tolerance, 1 + RESPONSES)
        return tolerance


def find_rounding_flips(
    ours: Array,
    reference: Array,
    scores: Array,
    tolerance: float,
    groups: tuple[int, int] | None = None,
) -> Array:
    """Tokens for which other experts were chosen, all of them as good within rounding.

    That is where the router would choose as ours did, were each score off by the tolerance in favour
    of ours.

    Args:
        ours: Which experts are chosen, [tokens, experts].
        reference: The same of the reference.
        scores: What the reference chose by, [tokens, experts].
        tolerance: Of the scores, relative.
        groups: Of experts, and how many of them a token may choose from; None chooses from all experts.

    Returns:
        Truth values, [tokens].
    """
    off = tolerance * float(np.sqrt(np.mean(np.square(scores, dtype=np.float64))))
    favoured = np.where(ours, scores + off, scores - off)
    count = int(ours.sum(1).max(initial=0))
    if (
        groups is not None
    ):  # The best groups alone; a group's score is the sum of its best experts'.
        grouped = np.sort(favoured.reshape(len(favoured), groups[0], -1), axis=2)
        kept = _best(grouped[..., -(count // groups[1]) :].sum(2), groups[1])
        favoured = np.where(np.repeat(kept, grouped.shape[2], axis=1), favoured, -np.inf)
    return np.asarray((ours != reference).any(1) & (_best(favoured, count) == ours).all(1))


def _best(scores: Array, count: int) -> Array:
    """Which are the `count` largest of each row."""
    largest = np.argsort(scores, axis=1)[:, scores.shape[1] - count :]
    best = np.zeros(scores.shape, bool)
    np.put_along_axis(best, largest, True, axis=1)
    return best


def float_spacing(weights: Array, epsilon: float) -> Array:
    """From each weight to the next that its type can hold."""
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(np.abs(weights.astype(np.float64))))
    return np.asarray(np.exp2(exponents) * epsilon)


def update_error(ours: Array, reference: Array, scale: Array, least: Array) -> float:
    """The largest error of a row's update, in terms of the gradient's average that it follows.

    Where a weight's rounding takes in all moves of a row, it may have moved as far as that.

    Args:
        ours: How far each weight moved.
        reference: The same of the reference.
        scale: What the optimizer divided the average by.
        least: How far a weight may be off because it was rounded.
    """
    off = np.maximum(np.abs(ours - reference) - least, 0) * scale
    rows = (-1, ours.shape[-1]) if ours.ndim > 1 else (1, -1)
    may = (np.abs(reference) + least) * scale
    wrong, size = (np.linalg.norm(one.reshape(rows), axis=1) for one in (off, may))
    if not np.isfinite(wrong).all() or (wrong[size == 0] > 0).any():
        return np.inf
    return float((wrong[size > 0] / size[size > 0]).max(initial=0.0))


def divide_by_reach(off: Array, reach: Array, least: Array) -> Array:
    """By how much weights are off, in terms of how far their updates reach; 0 within rounding.

    Args:
        off: The difference.
        reach: How far the updates would have moved each by a gradient of the size that its row has.
        least: How far a weight may be off because it was rounded.
    """
    beyond = np.maximum(np.abs(off) - least, 0) * np.sign(off)
    smallest = float(np.finfo(np.float32).tiny)  # Of a weight of zero.
    return np.asarray(beyond / np.maximum(reach + least, smallest), np.float64)


def largest_row_mean(values: Array) -> float:
    """The largest quadratic mean of a row."""
    if not np.isfinite(values).all():
        return np.inf
    rows = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    return float(np.sqrt(np.square(rows).mean(1)).max(initial=0.0))
