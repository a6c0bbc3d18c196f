import numpy as np
import pytest

from parakit.artifacts.capture import NORM_RANKS_PREFIX, CaptureStage, Placement, TensorKey
from parakit.verify.compare import compare
from parakit.verify.norm import check_norm_counts
from tests.verify.captures import KEY, WEIGHT, place, rank, write

GRADIENT = TensorKey(CaptureStage.REDUCED_GRADIENTS, WEIGHT, "gradient")


def counting(number, groups, *counted, **described):
    """A rank that has rows 2·number and 2·number+1, and counts elements of a group's norm."""
    held, placement = np.ones((2, 3), np.float32), place((0, 2 * number, 0))
    tensors = [(GRADIENT, held, placement)]
    for group, times in zip(groups, counted, strict=True):
        slot = NORM_RANKS_PREFIX + " ".join(map(str, group))
        if times is not None:
            values = np.full((2, 3), times, np.uint8)
            tensors.append((TensorKey(CaptureStage.NORM, WEIGHT, slot), values, placement))
    return rank(number, **{"world_size": 2, "norm_groups": groups, **described}), tensors


def test_every_element_counted_once_over_the_group_is_right(tmp_path):
    ranks = [counting(n, ((0, 1),), 1, tensor=(n, 2)) for n in range(2)]
    (comparison,) = check_norm_counts(write(tmp_path / "c", ranks))
    assert (comparison.kind, comparison.fraction) == ("", 0)


@pytest.mark.parametrize(
    ("times", "ranks", "kind"),
    [
        (None, (1,), "not counted in the norm by rank 1"),
        (2, (1,), "counted 2 times in the norm"),
    ],
)
def test_a_part_that_is_not_counted_once_names_the_rank_that_holds_it(tmp_path, times, ranks, kind):
    first = counting(0, ((0, 1),), 1, tensor=(0, 2))
    capture = write(tmp_path / "c", [first, counting(1, ((0, 1),), times, tensor=(1, 2))])
    (comparison,) = check_norm_counts(capture)
    assert (comparison.kind, comparison.ranks, comparison.fraction) == (kind, ranks, 0.5)


def test_norm_not_summed_over_the_ranks_of_other_parts_lacks_these_parts(tmp_path):
    ranks = [counting(n, ((n,),), 1, data=(n, 2)) for n in range(2)]
    (comparison,) = check_norm_counts(write(tmp_path / "c", ranks))
    assert comparison.kind == "not counted in the norm of rank 0: rank 1 not in its group"


def test_copy_counted_by_a_rank_outside_the_group_is_missing_from_the_norm(tmp_path):
    ranks = [counting(n, ((n,),), 1 - n or None) for n in range(2)]
    for _, tensors in ranks:  # Both have the whole of it, as of tied embeddings.
        tensors[:] = [
            (tensor_key, values, place((0, 0, 0), (1, 2, 3))) for tensor_key, values, _ in tensors
        ]
    (comparison,) = check_norm_counts(write(tmp_path / "c", ranks))
    assert (comparison.kind, comparison.ranks) == (
        "not counted in the norm of rank 1: rank 0 not in its group",
        (0,),
    )


def test_a_parameter_whose_gradient_the_optimizer_lacks_is_counted_by_no_norm(tmp_path):
    local = TensorKey(CaptureStage.LOCAL_GRADIENTS, WEIGHT, "gradient")
    here, tensors = counting(0, ((0,),), None, world_size=1)
    tensors[:] = [(local, tensors[0][1], place((0, 0, 0), (1, 2, 3)))]
    capture = write(tmp_path / "c", [(here, tensors)])
    assert not list(check_norm_counts(capture))
    (comparison,) = check_norm_counts(capture, [(KEY, (0,), "gradient")])
    assert comparison.kind == "not counted in the norm by rank 0"


def test_experts_may_have_their_own_norm_group(tmp_path):
    alone, both = counting(0, ((0,), (0, 1)), None, 1), counting(1, ((1,), (0, 1)), None, 1)
    (comparison,) = check_norm_counts(write(tmp_path / "c", [alone, both]))
    assert comparison.kind == ""


def test_norm_is_not_checked_if_no_rank_computes_it(tmp_path):
    assert not list(check_norm_counts(write(tmp_path / "c", [counting(0, (), world_size=1)])))


def test_part_missing_from_the_norm_comes_before_the_norms_value(tmp_path):
    ranks = [counting(n, ((0, 1),), 1 - n or None, tensor=(n, 2)) for n in range(2)]
    value = TensorKey(CaptureStage.NORM, "grad_norm", "returned")
    for _, tensors in ranks:
        tensors.append((value, np.array([1.0])))
    whole = Placement(KEY, (1, 4, 3), (0, 0, 0))
    reference_tensors = [(GRADIENT, np.ones((4, 3), np.float32), whole), (value, np.array([2.0]))]
    reference = write(tmp_path / "r", [(rank(), reference_tensors)])
    wrong = compare(reference, write(tmp_path / "c", ranks)).wrong()
    assert [comparison.key[1] for comparison in wrong] == [WEIGHT, "grad_norm"]
    assert (wrong[0].fault, wrong[0].wrong_ranks) == ("not counted in the norm by rank 1", {1})
