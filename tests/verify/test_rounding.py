import numpy as np
import pytest

from parakit.artifacts.capture import RECOMPUTED_PREFIX, CaptureStage
from parakit.verify.tolerance import (
    RESPONSES,
    Tolerances,
    find_rounding_flips,
    float_spacing,
    update_error,
)
from tests.verify.captures import MODULE, WEIGHT, output, random, rank, write

SCORES = np.array([[1.0, 0.999, 0.2], [1.0, 0.5, 0.2]], np.float32)
BEST = np.array([[True, False, False], [True, False, False]])
SECOND = np.array([[False, True, False], [False, True, False]])


def test_other_choice_is_within_rounding_only_if_scores_are_that_close():
    assert find_rounding_flips(SECOND, BEST, SCORES, 1e-3).tolist() == [True, False]
    assert find_rounding_flips(BEST, BEST, SCORES, 1e-3).tolist() == [False, False]
    assert find_rounding_flips(SECOND, BEST, SCORES, 1e-5).tolist() == [False, False]


def test_all_chosen_experts_must_be_within_rounding():
    ours, reference = np.array([[False, True, True]]), np.array([[True, True, False]])
    assert not find_rounding_flips(ours, reference, SCORES[:1], 1e-3).any()


def test_experts_of_another_group_are_within_rounding_if_group_sums_are():
    # Groups (0, 1) and (2, 3): sums of 1.5 and 1.499, though the experts' own scores are far apart.
    scores = np.array([[1.0, 0.5, 0.75, 0.749]])
    first, second = np.array([[True, True, False, False]]), np.array([[False, False, True, True]])
    assert find_rounding_flips(second, first, scores, 1e-3, groups=(2, 1)).all()
    assert not find_rounding_flips(second, first, scores, 1e-4, groups=(2, 1)).any()
    assert not find_rounding_flips(second, first, scores, 1e-3).any()
    mixed = np.array([[True, False, True, False]])
    assert not find_rounding_flips(mixed, first, scores, 1e-3, groups=(2, 1)).any()


@pytest.mark.parametrize(("epsilon", "expected"), [(2.0**-23, 2.0**-23), (2.0**-7, 2.0**-7)])
def test_float_spacing_is_that_of_the_weights_dtype(epsilon, expected):
    assert float_spacing(np.array([1.5, -0.25, 0.0]), epsilon).tolist() == [
        expected,
        expected / 4,
        0,
    ]


def test_update_error_is_the_largest_of_a_row_relative_to_the_gradient():
    reference = np.array([[1.0, 1.0], [1.0, 0.0]])
    nothing = np.zeros((2, 2))
    ours = np.array([[1.0, 1.0], [1.5, 0.0]])
    assert update_error(ours, reference, np.ones((2, 2)), nothing) == 0.5
    # An element whose gradient is all rounding moves either way, and weighs as little as its gradient.
    either, scale = np.array([[1.0, -1.0], [1.0, 0.0]]), np.array([[1.0, 1e-8], [1.0, 1.0]])
    assert update_error(either, reference, scale, nothing) == pytest.approx(2e-8)
    # A weight that is off by the rounding of the weight itself is right.
    assert update_error(ours, reference, np.ones((2, 2)), np.full((2, 2), 0.5)) == 0


def test_row_that_moves_less_than_its_rounding_has_no_error():
    still, moved = np.zeros((1, 2)), np.array([[0.0, 0.2]])
    scale, least = np.array([[1.0, 1e-3]]), np.array([[1.0, 0.1]])
    assert update_error(moved, still, scale, least) == pytest.approx(1e-4)


def test_update_of_a_row_without_updates_has_infinite_error():
    still, moved = np.zeros(3), np.array([0.0, 1.0, 0.0])
    assert update_error(moved, still, np.ones(3), still) == np.inf
    assert update_error(still, still, np.ones(3), still) == 0


def test_what_is_recomputed_may_differ_as_much_as_in_the_first_forward_pass(tmp_path):
    # The strategy alone recomputes the module, so the reference has measured the first pass alone.
    reference = write(tmp_path, [(rank(), [(output(), random(8, 2, 6))])], response=1e-3)
    record = reference.ranks[0].records[0]
    recomputed = (CaptureStage.ACTIVATION_GRADIENTS, MODULE, f"{RECOMPUTED_PREFIX}output")
    assert Tolerances(reference).tolerance_for(recomputed, record) == pytest.approx(
        RESPONSES * 1e-3
    )


def test_a_square_may_round_twice_as_much_as_its_gradient(tmp_path):
    reference = write(tmp_path, [(rank(dtype="bfloat16"), [(output(), random(4, 3))])], response=0)
    record = reference.ranks[0].records[0]
    tolerances = Tolerances(reference)
    average, square = (
        tolerances.tolerance_for((CaptureStage.OPTIMIZER_STATE, WEIGHT, slot), record)
        for slot in ("exp_avg", "exp_avg_sq")
    )
    assert square == 2 * average > 0
