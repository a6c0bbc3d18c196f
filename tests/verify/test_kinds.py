import numpy as np
import pytest

from parakit.artifacts.capture import CaptureStage
from parakit.verify.comparison import ComparedTensor, TensorComparison, relative_error
from parakit.verify.kinds import classify_error
from tests.verify.captures import random, rank

WHOLE = random(8, 4)
LAYOUT = rank(tensor=(0, 2), data=(0, 3), micro_batches=5, world_size=6, vocabulary=6)


def kind(
    ours, reference=WHOLE, name="decoder.layers.0", more_ranks=(), like=(), slot="output", **fields
):
    pairs = [
        ComparedTensor(number, 0, values, reference)
        for number, values in enumerate((ours, *more_ranks))
    ]
    comparison = TensorComparison(
        (CaptureStage.OUTPUTS, name, slot), tolerance=1e-6, order=0, **fields
    )
    comparison.error, comparison.worst = relative_error(ours, reference), pairs[0]
    return classify_error(comparison, pairs, LAYOUT, like)


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (2, "×TP"),
        (1 / 2, "÷TP"),
        (3, "×DP"),
        (1 / 5, "÷micro batches"),
        (3**0.5, "×√DP"),
        (1.25, "1.25"),
    ],
)
def test_constant_factor_is_named_after_a_parallel_degree(factor, name):
    comparison = kind(WHOLE * np.float32(factor))
    assert (comparison.name.split(" or ")[0], comparison.factor) == (
        f"factor {name}",
        pytest.approx(factor),
    )


def test_a_factor_of_1_explains_no_error():
    # The error of an update is that of its worst row; the full tensor is right but for rounding.
    ours = WHOLE.copy()
    ours[3] *= np.float32(1 + 1e-6)
    comparison = TensorComparison(
        (CaptureStage.WEIGHTS, "decoder.layers.3", "update"), tolerance=4e-4, order=0
    )
    comparison.error, comparison.worst = 7e-4, ComparedTensor(0, None, ours, WHOLE)
    assert not classify_error(comparison, [comparison.worst], LAYOUT).name.startswith("factor")


def test_missing_sum_is_named_if_the_sum_over_ranks_fits():
    part = random(8, 4, seed=1)
    assert kind(WHOLE - part, more_ranks=(part,)).name == "missing sum over TP ranks"


def test_other_tensor_is_named_if_the_wrong_elements_are_its_own():
    other = random(8, 4, seed=1)
    like = [("micro batch 0", random(8, 4, seed=2)), ("rank 1", other)]
    assert kind(other, like=like).name == "that of rank 1"
    part = np.concatenate([other[:4], WHOLE[4:]])
    assert kind(part, like=like).name == "in part that of rank 1"
    numbers = np.arange(6)
    assert kind(numbers + 6, numbers, like=[("rank 1", numbers + 6)]).name == "that of rank 1"


def test_moved_rows_are_shifted_or_in_another_order():
    assert kind(np.roll(WHOLE, 2, 0)).name == "rows in another order"
    moved = np.concatenate([WHOLE[:4], WHOLE[3:7]])
    assert kind(moved).name == "rows shifted by -1"
    ids = np.arange(6)
    assert kind(ids[::-1].copy(), ids).name == "rows in another order"


def test_error_in_the_vocabulary_padding_alone_is_named():
    wrong = WHOLE.copy()
    wrong[6:] += 1
    assert kind(wrong, name="embedding.word_embeddings.weight").name == (
        "in the vocabulary's padding only"
    )
    assert kind(wrong).name == "in 2 of 8 rows, from 6 to 7"


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        ((3, 4), "missing sum of squares over 2 ranks"),
        ((3, 7), "another norm on each of the ranks"),
        ((10, 10), "factor ×TP"),
    ],
)
def test_norms_that_differ_between_ranks_are_named_first(ours, name):
    norms = [
        ComparedTensor(number, None, np.array([float(values)]), np.array([5.0]))
        for number, values in enumerate(ours)
    ]
    comparison = TensorComparison(
        (CaptureStage.NORM, "grad_norm", "returned"), tolerance=1e-6, order=0
    )
    for norm in norms:
        comparison.add(norm)
    assert classify_error(comparison, norms, LAYOUT).name == name


def test_tensor_that_is_not_finite_is_named():
    wrong = WHOLE.copy()
    wrong[0, 0] = np.nan
    assert kind(wrong).name == "not finite"


def test_copies_that_differ_by_a_bit_are_named():
    comparison = TensorComparison(
        (CaptureStage.WEIGHTS, "a", "weight"), 1e-6, 0, replicas_differ=(0, 1)
    )
    assert classify_error(comparison, (), LAYOUT).name == "copies differ between ranks"


def test_noise_on_some_ranks_alone_is_named():
    comparison = kind(WHOLE + random(8, 4, seed=2), wrong_ranks={1}, right_ranks={0})
    assert comparison.name == "wrong on some ranks only"
    assert kind(WHOLE + random(8, 4, seed=2)).name == "other"
    few = WHOLE + (np.arange(8) == 3)[:, None]
    comparison = kind(few.astype(np.float32), wrong_ranks={1}, right_ranks={0})
    assert comparison.name == "wrong on some ranks only, in 1 of 8 rows, from 3 to 3"


def to_bf16(values):
    return ((values.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


def test_rounding_to_bf16_is_recognized_by_bits_or_by_size():
    assert kind(to_bf16(WHOLE)).name == "rounding to bf16"
    errors = np.random.default_rng(3).uniform(-(2**-9), 2**-9, WHOLE.shape)
    assert kind((WHOLE * (1 + errors)).astype(np.float32)).name == "rounding to bf16"
    assert kind(to_bf16(WHOLE) * 2, to_bf16(WHOLE)).name == "factor ×TP"


def test_tensor_of_another_parameter_is_named_alone_or_added():
    other = random(8, 4, seed=5)
    like = [("a.weight", random(8, 4, seed=6)), ("b.weight", other)]
    assert kind(other, like=like).name == "that of b.weight"
    assert kind(WHOLE + other, like=like).name == "a sum too many: b.weight on top"


@pytest.mark.parametrize(("slot", "power"), [("exp_avg", 1), ("exp_avg_sq", 2)])
def test_state_with_another_multiple_of_its_gradient_is_named(slot, power):
    gradient = random(8, 4, seed=7)
    taken = WHOLE + np.float32(0.3) * gradient**power
    comparison = kind(taken, name="a.weight", slot=slot, like=[("a.weight", gradient)])
    assert comparison.name == "another multiple of its gradient"


@pytest.mark.parametrize(("slot", "power"), [("exp_avg", 1), ("exp_avg_sq", 2)])
def test_state_that_lost_earlier_iterations_is_named(slot, power):
    gradient = random(8, 4, seed=7)
    reset = np.float32(0.1) * gradient**power
    comparison = kind(
        reset, WHOLE + reset, name="a.weight", slot=slot, like=[("a.weight", gradient)]
    )
    assert comparison.name == (
        "its gradient in this iteration alone: the state of earlier iterations is missing"
    )
    # In the first iteration the right state is a multiple of the gradient, too.
    first = kind(3 * reset, reset, name="a.weight", slot=slot, like=[("a.weight", gradient)])
    assert first.name == "factor ×DP"


def test_equal_steps_up_and_down_are_named_with_their_size():
    # Megatron's update of the experts' biases adds the rate, or subtracts it.
    signs = np.where(random(8, seed=3) > 0, np.float32(1), np.float32(-1))
    bias = random(8, seed=4) / 10
    assert kind(bias + np.float32(1e-3) * signs, bias).name == (
        "each element is 0.001 larger or smaller"
    )
    assert kind(bias + np.float32(1e-3) * random(8, seed=5), bias).name == "other"
    assert kind(bias + np.float32(1e-3), bias).name != "each element is 0.001 larger or smaller"


def test_tensor_that_no_rank_holds_is_named():
    comparison = TensorComparison(
        (CaptureStage.OPTIMIZER_STATE, "a", "exp_avg"), 1e-6, 0, error=1.0, uncovered=12
    )
    assert classify_error(comparison, (), LAYOUT).name == "held by no rank"


def compared_in_micro_batches(wrong: set[tuple[int, int]]) -> str:
    """Return the kind of an output of 2 ranks and 3 micro batches that is wrong in these (rank, micro batch)."""
    comparison = TensorComparison(
        (CaptureStage.OUTPUTS, "decoder.layers.0", "output"), tolerance=1e-6, order=0
    )
    noise = random(8, 4, seed=9)
    for number in (0, 1):
        for micro_batch in (0, 1, 2):
            values = WHOLE + noise if (number, micro_batch) in wrong else WHOLE
            comparison.add(ComparedTensor(number, micro_batch, values, WHOLE))
    worst = comparison.worst
    assert worst is not None
    return classify_error(comparison, [worst], LAYOUT).name


def test_an_error_on_all_ranks_in_one_micro_batch_names_the_micro_batch():
    assert compared_in_micro_batches({(0, 1), (1, 1)}) == "wrong in micro batch 1 of 3 only"
    wrong = {(0, 0), (1, 0), (0, 2), (1, 2)}
    assert compared_in_micro_batches(wrong) == "wrong in 2 of 3 micro batches only"


def test_an_error_of_one_rank_in_one_micro_batch_is_one_of_some_ranks():
    assert compared_in_micro_batches({(1, 2)}) == "wrong on some ranks only"
    assert compared_in_micro_batches({(0, 0), (0, 1), (0, 2)}) == "wrong on some ranks only"


def test_tensor_or_elements_that_are_zero_are_named():
    assert kind(np.zeros_like(WHOLE)).name == "zero"
    lost = WHOLE.copy()
    lost[:, 1] = 0
    assert kind(lost).name == "zero in 8 of 32 elements"
    assert kind(WHOLE, np.zeros_like(WHOLE)).name != "zero"


@pytest.mark.parametrize(
    ("factor", "name"), [(0, "not updated"), (2, "updated twice"), (3, "factor ×DP")]
)
def test_update_that_is_missing_or_applied_twice_is_named(factor, name):
    assert kind(WHOLE * np.float32(factor), slot="update").name == name
    assert kind(WHOLE * np.float32(2), slot="output").name == "factor ×TP"


@pytest.mark.parametrize(
    ("ours", "reference", "name"),
    [
        (0.0, 0.1, "0 instead of 0.1"),
        (0.25, 0.1, "0.25 instead of 0.1"),
        (0.1, 0.0, "0.1 instead of 0"),
        (0.2, 0.1, "factor ×TP"),
    ],
)
def test_a_single_number_is_named_by_its_values(ours, reference, name):
    assert kind(np.array([ours]), np.array([reference])).name == name


def test_a_sum_over_smaller_groups_is_named():
    parts = [random(8, 4, seed=seed) for seed in (1, 2)]
    whole = parts[0] + parts[1]
    ranks = [parts[0], parts[0], parts[1], parts[1]]
    ours = kind(ranks[0], whole, more_ranks=ranks[1:])
    assert ours.name == "missing sum over 4 ranks, only over groups of 2"
    mean = kind(ranks[0], whole / 2, more_ranks=ranks[1:])
    assert mean.name == "missing mean over 4 ranks, only over groups of 2"


def test_equal_tensors_on_all_ranks_are_no_missing_sum():
    other = random(8, 4, seed=3)
    assert "missing" not in kind(other, more_ranks=(other,)).name


def test_rows_of_the_reference_times_factors_are_named_with_the_range() -> None:
    factors = np.linspace(0.5, 2, 8, dtype=np.float32)
    name = "each row times a factor of its own, from 0.5 to 2"
    assert kind(WHOLE * factors[:, np.newaxis]).name == name


def test_vectors_that_are_added_to_many_rows_are_counted() -> None:
    reference = random(32, 4)
    ours = reference.copy()
    ours[2:20] += random(4, seed=1)
    assert kind(ours, reference).name == "the same vector on top of 18 of 32 rows"
    ours[20:30] += random(4, seed=2)
    assert kind(ours, reference).name == "one of 2 vectors on top of 28 of 32 rows"
    assert "vector" not in kind(reference + random(32, 4, seed=1), reference).name


def test_mask_that_hides_other_elements_is_named() -> None:
    scores = np.tril(np.abs(random(8, 8)) + 1)
    hidden = scores.copy()
    hidden[np.arange(1, 8), np.arange(7)] = 0
    hidden[:, 0] *= np.float32(1.5)
    name = "another mask: zero in 7 of 64 elements that should not be"
    assert kind(hidden, scores).name == name
    shown = scores + np.float32(0.5)
    shown[:, 3] *= 2
    name = "another mask: not zero in 28 of 64 elements that should be"
    assert kind(shown, scores).name == name


def test_few_columns_or_elements_are_named() -> None:
    reference = random(16, 16)
    ours = reference.copy()
    ours[:, 4:7] = random(16, 3, seed=1)
    assert kind(ours, reference).name == "in 3 of 16 columns, from 4 to 6"
    ours = reference.copy()
    ours[np.arange(16), np.arange(16)] += random(16, seed=1) + 3
    assert kind(ours, reference).name == "in 16 of 256 elements"


def test_factor_that_explains_most_of_the_error_is_approximate() -> None:
    reference = random(16, 16)
    ours = reference * np.float32(1.5) + np.float32(0.1) * random(16, 16, seed=1)
    assert kind(ours, reference).name.startswith("about 1.")


def test_ranks_that_should_have_equal_tensors_and_do_not_are_named() -> None:
    wrong = [random(8, 4, seed=seed) for seed in (1, 2)]
    assert kind(wrong[0], more_ranks=(wrong[1],)).name == "copies differ between ranks"
    assert kind(wrong[0], more_ranks=(wrong[0],)).name == "other"


def test_scores_of_rounded_keys_are_noise_of_that_size() -> None:
    queries, keys = random(64, 32), random(64, 32, seed=1)
    size = np.float32(2**8)
    rounded = np.round(keys * size) / size
    assert kind(queries @ rounded.T, queries @ keys.T).name == "noise of the size of bf16 rounding"
    assert kind(random(64, 64), random(64, 64, seed=1)).name == "other"
