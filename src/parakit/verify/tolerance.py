"""Decide how far rounding may move a tensor: its tolerance, relative to the reference.

A tensor's response is its relative change when every weight of the reference, and every input of its
modules, changes by one rounding error. The tolerance is a few times the response, and never less than the
rounding of a sum of as many terms. Two cases need more than a tolerance. A router takes the best experts,
and two experts may be equal within rounding. Adam divides a gradient by its size, so an element whose
gradient is all rounding moves as far as any other, in either direction.
"""

from __future__ import annotations

import numpy as np

from parakit.artifacts.capture import (
    BUFFER,
    LOSS,
    PER_TOKEN_LOSS,
    RECOMPUTED_PREFIX,
    START_BUFFER,
    START_WEIGHT,
    UPDATE_SUFFIX,
    CaptureStage,
    TensorRecord,
)
from parakit.verify.captured import PARAMETERS, Array, Capture, VerifyError
from parakit.verify.comparison import ComparisonKey

RESPONSES = 6.0
"""Tolerance over response. Healthy strategies stay below 2 (README, `make bench NAME=verify`)."""
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next larger number of each dtype."""
_NORM_TERMS = 64
"""Terms of the sum that rounds as the gradient norm does. The norm sums many squares, whose rounding
errors matter less than those of terms with signs."""
_SECOND_MOMENT = "exp_avg_sq"
_SLOT_WITH_RESPONSE = {START_WEIGHT: UPDATE_SUFFIX, START_BUFFER: BUFFER}
"""Slots whose response is not measured, with the slot whose response is taken instead."""


class Tolerances:
    """Tolerances of all tensors. They follow from the responses to rounding that the reference has measured."""

    def __init__(self, reference: Capture) -> None:
        self._reference = reference
        self._responses = reference.responses()
        self._names_with_second_moment = {
            name for _, name, slot in self._responses if slot == _SECOND_MOMENT
        }
        # Muon computes in bf16: one rounding error of fp32 changes the update of some matrices by a
        # hundredth and of other matrices not at all. So weights whose optimizer keeps no second moment
        # all get the largest response of their slot.
        self._response_without_second_moment: dict[str, float] = {}
        for (stage, name, slot), response in self._responses.items():
            if stage == CaptureStage.WEIGHTS and name not in self._names_with_second_moment:
                known_response = self._response_without_second_moment.get(slot, 0.0)
                self._response_without_second_moment[slot] = max(known_response, response)

    def tolerance_for(self, key: ComparisonKey, record: TensorRecord) -> float:
        """Return the tolerance of a tensor with the dtype and shape of `record`.

        The tolerance is a relative error. It is 0 for integers and truth values, which must be equal.
        """
        if not record.dtype.startswith(("float", "bfloat")):
            return 0.0
        stage, name, slot = key
        measured_slot = _SLOT_WITH_RESPONSE.get(slot, slot)
        response = self._responses.get((stage, name, measured_slot), 0.0)
        if slot.startswith(RECOMPUTED_PREFIX):
            # The reference may compute once what the strategy computes again in its backward pass.
            first_stage = CaptureStage.LOSS if name == LOSS else CaptureStage.OUTPUTS
            first_key = (first_stage, name, slot.removeprefix(RECOMPUTED_PREFIX))
            response = max(response, self._responses.get(first_key, 0.0))
        if stage is CaptureStage.WEIGHTS and name not in self._names_with_second_moment:
            response_of_slot = self._response_without_second_moment.get(measured_slot, 0.0)
            response = max(response, response_of_slot)
        rounding = self._sum_rounding(stage, record)
        if slot.startswith(_SECOND_MOMENT):
            # A square has twice the relative error of its gradient.
            rounding *= 2
        tolerance = RESPONSES * max(response, rounding / 4)
        if slot.endswith(UPDATE_SUFFIX) and tolerance >= 1:
            # The worst row's gradient may be all rounding. Its update then points anywhere, and can be
            # larger or smaller than the reference's.
            return max(tolerance, 1 + RESPONSES)
        return tolerance

    def _sum_rounding(self, stage: CaptureStage, record: TensorRecord) -> float:
        """Estimate the relative rounding error of a tensor whose elements are sums.

        The number of terms per element is estimated from the stage and the shape in `record`. The error is the
        dtype's epsilon times the square root of this number.
        """
        rank = self._reference.first
        if stage in PARAMETERS:
            num_terms = rank.sequence_length * rank.micro_batch_size * rank.micro_batches
        else:
            num_terms = max((*record.shape, _NORM_TERMS if stage is CaptureStage.NORM else 1))
        epsilon = EPSILON.get(rank.dtype, EPSILON["float32"])
        rounding = epsilon * float(np.sqrt(num_terms))
        if stage is CaptureStage.LOSS:
            # A loss is a sum over tokens in fp32. Its measured response can be next to nothing by chance.
            num_tokens = rank.sequence_length * rank.micro_batch_size
            rounding = max(rounding, EPSILON["float32"] * float(np.sqrt(num_tokens)))
        return rounding


def find_token_loss_tolerance(reference: Capture) -> float:
    """Return the relative error up to which rounding explains a difference of the loss per token.

    Args:
        reference: Capture with measured responses.

    Raises:
        VerifyError: The capture has no loss per token.
    """
    key = (CaptureStage.LOSS, LOSS, PER_TOKEN_LOSS)
    for record in reference.ranks[-1].records:
        tensor_key = record.tensor_key
        if (tensor_key.stage, tensor_key.name, tensor_key.slot) == key:
            return Tolerances(reference).tolerance_for(key, record)
    raise VerifyError(
        f"{reference.folder} holds no loss per token, so there is nothing to compare."
    )


def find_rounding_flips(
    ours: Array,
    reference: Array,
    scores: Array,
    tolerance: float,
    groups: tuple[int, int] | None = None,
) -> Array:
    """Find the tokens whose experts differ from the reference only because of rounding.

    For such a token, the reference's router would choose the strategy's experts if each score changed by at
    most the tolerance. Tokens with the same experts in both runs give False.

    Args:
        ours: True for the chosen experts, [tokens, experts].
        reference: True for the experts that the reference chose, [tokens, experts].
        scores: Scores by which the reference chose, [tokens, experts].
        tolerance: Relative tolerance of the scores.
        groups: Number of expert groups, and number of groups that a token may choose from; None if a
            token may choose from all experts.

    Returns:
        Truth values, [tokens].
    """
    slack = tolerance * float(np.sqrt(np.mean(np.square(scores, dtype=np.float64))))
    favoured_scores = np.where(ours, scores + slack, scores - slack)
    num_chosen = int(ours.sum(1).max(initial=0))
    if groups is not None:
        # A token chooses from the best groups alone. A group's score is the sum of its best experts'.
        num_groups, num_allowed = groups
        by_group = np.sort(favoured_scores.reshape(len(favoured_scores), num_groups, -1), axis=2)
        group_scores = by_group[..., -(num_chosen // num_allowed) :].sum(2)
        is_allowed_group = _select_largest(group_scores, num_allowed)
        is_allowed = np.repeat(is_allowed_group, by_group.shape[2], axis=1)
        favoured_scores = np.where(is_allowed, favoured_scores, -np.inf)
    is_other_choice = (ours != reference).any(1)
    is_explained = (_select_largest(favoured_scores, num_chosen) == ours).all(1)
    return np.asarray(is_other_choice & is_explained)


def _select_largest(scores: Array, count: int) -> Array:
    """Return truth values of the shape of `scores`: True for the `count` largest of each row."""
    largest = np.argsort(scores, axis=1)[:, scores.shape[1] - count :]
    is_largest = np.zeros(scores.shape, bool)
    np.put_along_axis(is_largest, largest, True, axis=1)
    return is_largest


def float_spacing(weights: Array, epsilon: float) -> Array:
    """Return the distance from each weight to the next number of its dtype; 0 for a weight of 0.

    `epsilon` is the distance from 1 to the next number.
    """
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(np.abs(weights.astype(np.float64))))
    return np.asarray(np.exp2(exponents) * epsilon)


def update_error(ours: Array, reference: Array, divisor: Array, rounding: Array) -> float:
    """Return the largest relative error of a row's update, weighted by the optimizer's divisor.

    An update times its divisor has the unit of the average gradient. A row runs along the last dimension of the
    parameter, and a vector is one row. Differences of up to `rounding` per element are no error. The result is
    infinite if an update is not finite, or if a row differs in which the reference has neither an update nor
    rounding.

    Args:
        ours: The change of each weight.
        reference: The change of each weight of the reference.
        divisor: Number by which the optimizer divided each element's average gradient.
        rounding: How far each weight may be off because it was rounded.
    """
    difference = np.maximum(np.abs(ours - reference) - rounding, 0) * divisor
    expected = (np.abs(reference) + rounding) * divisor
    row_shape = (-1, ours.shape[-1]) if ours.ndim > 1 else (1, -1)
    errors = np.linalg.norm(difference.reshape(row_shape), axis=1)
    sizes = np.linalg.norm(expected.reshape(row_shape), axis=1)
    if not np.isfinite(errors).all() or (errors[sizes == 0] > 0).any():
        return np.inf
    return float((errors[sizes > 0] / sizes[sizes > 0]).max(initial=0.0))


def divide_by_reach(difference: Array, reach: Array, rounding: Array) -> Array:
    """Divide the differences of weights by the distance that their updates can move them.

    The result is dimensionless and keeps the sign. Differences within `rounding` give 0.

    Args:
        difference: Our weights minus the reference's.
        reach: How far the updates would have moved each weight by a gradient of its row's size.
        rounding: How far each weight may be off because it was rounded.
    """
    beyond_rounding = np.maximum(np.abs(difference) - rounding, 0) * np.sign(difference)
    # A weight of 0 without updates has neither reach nor rounding, so it would be divided by 0.
    smallest = float(np.finfo(np.float32).tiny)
    return np.asarray(beyond_rounding / np.maximum(reach + rounding, smallest), np.float64)


def largest_row_mean(values: Array) -> float:
    """Return the largest quadratic mean of a row; infinite if a value is not finite.

    A row runs along the last dimension, and a vector is one row.
    """
    if not np.isfinite(values).all():
        return np.inf
    rows = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    return float(np.sqrt(np.square(rows).mean(1)).max(initial=0.0))
