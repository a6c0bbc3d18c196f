import json

import numpy as np
import pytest

from parakit.artifacts.capture import (
    COUNTS,
    LOSS,
    MASTER_CAST,
    RESPONSES_FILE,
    START_WEIGHT,
    UNOBSERVED_FILE,
    UNOBSERVED_GRADIENT,
    UPDATE_MAGNITUDE,
    CapturedModule,
    CaptureStage,
    CaptureWriter,
    Placement,
    TensorKey,
)
from parakit.verify.captured import encode_tensor, read_capture, round_to_dtype
from parakit.verify.compare import compare, measure_drift
from parakit.verify.tolerance import RESPONSES
from tests.verify.captures import (
    BATCH,
    KEY,
    SEQUENCE,
    WEIGHT,
    output,
    pair,
    place,
    random,
    rank,
    write,
)

WHOLE = random(4, 3)


def weights(stage=CaptureStage.WEIGHTS, slot="weight"):
    return TensorKey(stage, WEIGHT, slot)


def split(stage, *values):
    """Every rank holds rows 2·rank and 2·rank+1 of the whole weight."""
    return [
        (
            rank(number, tensor=(number, 2), world_size=2),
            [(weights(stage), part, place((0, 2 * number, 0)))],
        )
        for number, part in enumerate(values)
    ]


def compare_tensors(tmp_path, ours, reference_tensors, **changed):
    return compare(*pair(tmp_path, ours, reference_tensors, **changed))


def whole(stage=CaptureStage.WEIGHTS):
    return [(weights(stage), WHOLE, place((0, 0, 0)))]


def test_error_below_the_measured_tolerance_holds_and_error_above_differs(tmp_path):
    values = np.ones(4, np.float32)
    reference = write(tmp_path / "r", [(rank(), [(output(), values)])], response=1e-3)
    below = write(
        tmp_path / "a", [(rank(), [(output(), values * np.float32(1 + RESPONSES * 0.9e-3))])]
    )
    above = write(
        tmp_path / "b", [(rank(), [(output(), values * np.float32(1 + RESPONSES * 1.1e-3))])]
    )
    assert not compare(reference, below).wrong()
    (wrong,) = compare(reference, above).wrong()
    assert (wrong.key, wrong.wrong_ranks) == ((CaptureStage.OUTPUTS, output().name, "output"), {0})


def test_loss_tolerance_covers_the_rounding_of_a_sum_over_tokens(tmp_path):
    tensor_key = TensorKey(CaptureStage.LOSS, LOSS, "sum", 0)
    epsilon = np.finfo(np.float32).eps

    def losses(folder, value):
        return write(
            tmp_path / folder, [(rank(), [(tensor_key, np.float32([value]))])], response=0.0
        )

    reference = losses("r", 1.0)  # Of 16 tokens.
    assert not compare(reference, losses("a", 1 + 5 * epsilon)).wrong()
    assert compare(reference, losses("b", 1 + 7 * epsilon)).wrong()


def test_weight_shards_are_compared_with_their_part_of_the_reference(tmp_path):
    result = compare_tensors(tmp_path, split(CaptureStage.WEIGHTS, WHOLE[:2], WHOLE[2:]), whole())
    assert (result.wrong(), result.compared, result.seen) == ([], 2, 2)
    swapped = compare_tensors(
        tmp_path / "s", split(CaptureStage.WEIGHTS, WHOLE[2:], WHOLE[:2]), whole()
    )
    assert swapped.wrong()[0].wrong_ranks == {0, 1}


def test_copies_that_differ_in_the_last_bit_are_wrong_without_a_tolerance(tmp_path):
    near = np.nextafter(WHOLE, np.float32(9))
    ours = [
        (rank(0, data=(0, 2), world_size=2), whole()),
        (rank(1, data=(1, 2), world_size=2), [(weights(), near, place((0, 0, 0)))]),
    ]
    (wrong,) = compare_tensors(tmp_path, ours, whole(), micro_batches=2).wrong()
    assert wrong.replicas_differ == (0, 1)


def test_elements_of_a_sharded_optimizer_that_no_rank_holds_are_counted(tmp_path):
    flat = WHOLE.ravel()
    parts = [np.where(np.arange(12) < 6, flat, np.nan), np.where(np.arange(12) >= 7, flat, np.nan)]
    held = Placement(place((0, 0, 0)).key, (1, 4, 3), (0, 0, 0), partial=True)
    ours = [
        (
            rank(n, data=(n, 2), world_size=2),
            [(weights(), part.reshape(4, 3).astype(np.float32), held)],
        )
        for n, part in enumerate(parts)
    ]
    (wrong,) = compare_tensors(tmp_path, ours, whole(), micro_batches=2).wrong()
    assert (wrong.uncovered, wrong.error) == (1, 0)


def test_local_gradients_are_averaged_over_data_parallel_ranks(tmp_path):
    stage = CaptureStage.LOCAL_GRADIENTS
    other = random(4, 3, seed=1)
    ours = [
        (rank(n, data=(n, 2), world_size=2), [(weights(stage), part, place((0, 0, 0)))])
        for n, part in enumerate((WHOLE + other, WHOLE - other))
    ]
    assert not compare_tensors(tmp_path, ours, whole(stage), micro_batches=2).wrong()


def test_local_gradients_of_tensor_parallel_ranks_may_add_up(tmp_path):
    stage = CaptureStage.LOCAL_GRADIENTS
    ours = [
        (rank(n, tensor=(n, 2), world_size=2), [(weights(stage), part, place((0, 0, 0)))])
        for n, part in enumerate((WHOLE - 1, np.ones_like(WHOLE)))
    ]
    assert not compare_tensors(tmp_path, ours, whole(stage)).wrong()


@pytest.mark.parametrize("per_token_loss", [False, True])
def test_a_reference_of_several_ranks_averages_local_gradients_as_the_layout_does(
    tmp_path, per_token_loss
):
    stage = CaptureStage.LOCAL_GRADIENTS
    changed = {"world_size": 2, "per_token_loss": per_token_loss}

    def alone(number):  # A part that one of two data-parallel ranks has, as its expert's.
        here = rank(number, data=(number, 2), expert=(number, 2), **changed)
        return here, [(weights(stage), WHOLE, Placement(KEY, (2, 4, 3), (number, 0, 0)))]

    def copied(number, tensor):  # A weight that both of two ranks have, whole or in part.
        kind = "tensor" if tensor else "data"
        here = rank(number, **{kind: (number, 2)}, **changed)
        return here, [(weights(stage), WHOLE, place((0, 0, 0)))]

    def one(values):
        return [(rank(per_token_loss=per_token_loss), [(weights(stage), values, place((0, 0, 0)))])]

    for name, ranks in {
        "experts": [alone(0), alone(1)],
        "copies": [copied(0, tensor=False), copied(1, tensor=False)],
        "wholes": [copied(0, tensor=True), copied(1, tensor=True)],
    }.items():
        reference, layout = (write(tmp_path / f"{name} {part}", ranks) for part in "rl")
        assert not compare(reference, layout).wrong()
        if name != "experts":
            sum_of_both = 2 if per_token_loss and name == "copies" else 1
            single = write(tmp_path / f"{name} s", one(sum_of_both * WHOLE))
            assert not compare(reference, single).wrong()


def test_step_of_a_tied_copy_is_compared_with_the_step_of_its_parameter(tmp_path):
    def tensors(name, steps):
        weight = (TensorKey(CaptureStage.WEIGHTS, name, "weight"), random(4, 3), place((0, 0, 0)))
        return [weight, (TensorKey(CaptureStage.OPTIMIZER_STATE, name, "step"), np.array([steps]))]

    ours = [
        (rank(0, pipeline=(0, 2), world_size=2), tensors(WEIGHT, 2)),
        (rank(1, pipeline=(1, 2), world_size=2), tensors("output_layer.weight", 3)),
    ]
    comparison = compare(*pair(tmp_path, ours, tensors(WEIGHT, 2)))
    assert not comparison.not_aligned
    (wrong,) = comparison.wrong()
    assert (wrong.key[1:], wrong.wrong_ranks) == ((WEIGHT, "step"), {1})


def test_steps_of_a_parameter_that_the_references_first_rank_lacks_are_compared(tmp_path):
    step = TensorKey(CaptureStage.OPTIMIZER_STATE, WEIGHT, "step")

    def stages(count):
        return [
            (rank(0, pipeline=(0, 2), world_size=2), []),
            (rank(1, pipeline=(1, 2), world_size=2), [(step, np.array([count]))]),
        ]

    reference = write(tmp_path / "r", stages(2.0))
    (wrong,) = compare(reference, write(tmp_path / "l", stages(3.0))).wrong()
    assert wrong.key[1:] == (WEIGHT, "step")


def test_gate_and_value_of_a_weight_are_compared_as_one_parameter(tmp_path):
    for stage in (CaptureStage.LOCAL_GRADIENTS, CaptureStage.WEIGHTS):
        halves = [
            (
                TensorKey(stage, f"{WEIGHT}[{n}]", "weight"),
                WHOLE[2 * n : 2 * n + 2],
                place((0, 2 * n, 0)),
            )
            for n in range(2)
        ]
        assert not compare_tensors(tmp_path / stage, [(rank(), halves)], halves).wrong()
        swapped = [(halves[0][0], WHOLE[2:], place((0, 0, 0))), halves[1]]
        (wrong,) = compare_tensors(tmp_path / "s" / stage, [(rank(), swapped)], halves).wrong()
        assert wrong.key[1] == WEIGHT


def test_every_norm_that_a_rank_clips_by_is_compared_with_the_references(tmp_path):
    returned, used = (
        TensorKey(CaptureStage.NORM, "grad_norm", "returned"),
        TensorKey(CaptureStage.NORM, "grad_norm", "used"),
    )
    ours = [(rank(), [(returned, np.array([2.0])), (used, np.array([2.5]))])]
    (wrong,) = compare_tensors(tmp_path, ours, [(returned, np.array([2.0]))]).wrong()
    assert (wrong.key[1], wrong.error) == ("grad_norm", 0.25)


def test_norm_that_one_optimizer_alone_computes_is_skipped_without_clipping(
    tmp_path,
):
    returned = TensorKey(CaptureStage.NORM, "grad_norm", "returned")
    zero, norm = [(returned, np.array([0.0]))], [(returned, np.array([2.0]))]
    compared = compare_tensors(
        tmp_path / "off", [(rank(clip_gradient=0.0), zero)], norm, clip_gradient=0.0
    )
    assert not compared.wrong()
    assert any("nothing is clipped" in line for line in compared.not_aligned)
    assert compare_tensors(tmp_path / "on", [(rank(), zero)], norm).wrong()


def test_integers_are_compared_exactly(tmp_path):
    ids = np.arange(8)
    (wrong,) = compare_tensors(
        tmp_path, [(rank(), [(output(), ids + (ids == 3))])], [(output(), ids)]
    ).wrong()
    assert (wrong.error, wrong.tolerance) == (1 / 8, 0)


def test_first_wrong_tensor_is_in_the_earliest_stage(tmp_path):
    early, late = output("a"), output("b")
    values = random(3)
    reference_tensors = [(late, values), (early, values), *whole()]
    ours = [
        (rank(), [(early, values + 1), (weights(), WHOLE + 1, place((0, 0, 0))), (late, values)])
    ]
    assert [
        comparison.key[1]
        for comparison in compare_tensors(tmp_path, ours, reference_tensors).wrong()
    ] == ["a", WEIGHT]


@pytest.mark.parametrize(
    ("module", "slot", "similar"),
    [
        ("mlp.linear_fc2", "output.1", ["decoder.layers.1.mlp.linear_fc2"]),
        # A router's numbers of tokens, and the only output of a linear layer, are no biases.
        ("mlp.router", "output.1", []),
        ("mlp.linear_fc2", "output", []),
    ],
)
def test_only_a_returned_bias_may_be_the_bias_of_another_layer(tmp_path, module, slot, similar):
    first, second = (output(f"decoder.layers.{layer}.{module}", slot=slot) for layer in (0, 1))
    reference_tensors = [(first, random(8)), (second, random(8, seed=1))]
    ours = [(rank(), [(first, random(8, seed=1)), (second, random(8, seed=1))])]
    compared = compare_tensors(tmp_path, ours, reference_tensors)
    (wrong,) = compared.wrong()
    assert [name for name, _ in compared.similar_tensors(wrong)] == similar


def layer_of(values, **described):
    """An output of a layer on every tensor-parallel rank."""
    modules = {"decoder.layers.0": CapturedModule("TransformerLayer", "")}
    return [
        (
            rank(n, tensor=(n, 2), world_size=2, modules=modules, **described),
            [(output("decoder.layers.0"), part)],
        )
        for n, part in enumerate(values)
    ]


def test_layer_output_must_be_equal_on_all_tensor_parallel_ranks(
    tmp_path,
):
    apart = (WHOLE, np.nextafter(WHOLE, np.float32(9)))
    reference, layout = (write(tmp_path / name, layer_of(apart)) for name in "rl")
    (wrong,) = compare(reference, layout).wrong()
    assert (wrong.replicas_differ, wrong.worst.rank) == ((0, 1), 1)
    split = {"sequence_parallel": True}
    reference, layout = (write(tmp_path / f"s{name}", layer_of(apart, **split)) for name in "rl")
    assert not compare(reference, layout).wrong()


@pytest.mark.parametrize(("off", "differs"), [(0.9, False), (1.1, True)])
def test_part_with_small_elements_may_have_the_error_of_the_full_tensor(tmp_path, off, differs):
    whole = np.ones((SEQUENCE, BATCH, 4), np.float32)
    whole[SEQUENCE // 2 :] = 1e-3  # What the second rank has.
    response = 1e-4
    reference_tensors = write(tmp_path / "reference", [(rank(), [(output(), whole)])], response)
    size = np.sqrt(np.mean(np.square(whole)))
    part = whole[SEQUENCE // 2 :] + np.float32(off * RESPONSES * response * size)
    first, second = (
        rank(number, tensor=(number, 2), world_size=2, sequence_parallel=True) for number in (0, 1)
    )
    ours = [(first, [(output(), whole[: SEQUENCE // 2])]), (second, [(output(), part)])]
    layout = write(tmp_path / "layout", ours)
    assert bool(compare(reference_tensors, layout).wrong()) is differs


def test_recomputed_tensor_is_ordered_after_the_tensor_computed_before_it(tmp_path):
    stage = CaptureStage.ACTIVATION_GRADIENTS
    late, early, again = (
        output(name, stage=stage, slot=slot)
        for name, slot in (("late", "output"), ("early", "output"), ("b", "recomputed.output"))
    )
    reference_tensors = [(output("b"), WHOLE), (late, WHOLE), (early, WHOLE)]
    ours = [(rank(), [(late, WHOLE), (again, WHOLE + 1), (early, WHOLE + 1)])]
    assert [
        comparison.key[1]
        for comparison in compare_tensors(tmp_path, ours, reference_tensors).wrong()
    ] == ["b", "early"]


ROUTER = "decoder.layers.0.mlp.router"


def routed(*best, scores=((1.0, 1 - 1e-7), (1.0, 0.5))):
    """Scores of two experts for two tokens, and which of the two is chosen for each."""
    chosen = np.eye(2, dtype=bool)[list(best)]
    return [
        (output(ROUTER, slot="scores"), np.array(scores, np.float32)),
        (output(ROUTER, slot="choice"), chosen),
    ]


def test_routing_choice_within_rounding_is_counted_and_any_other_differs(tmp_path):
    near = compare_tensors(tmp_path, [(rank(), routed(1, 0))], routed(0, 0))
    assert (near.wrong(), near.routing_flips) == ([], 1)
    far = compare_tensors(tmp_path / "f", [(rank(), routed(1, 1))], routed(0, 0))
    (wrong,) = far.wrong()
    assert (wrong.key, wrong.error, far.routing_flips) == (
        (CaptureStage.OUTPUTS, ROUTER, "choice"),
        0.5,
        1,
    )


def test_choices_of_an_earlier_iteration_are_counted_and_not_compared(tmp_path):
    def earlier(*best):
        return [
            (
                TensorKey(tensor_key.stage, tensor_key.name, f"iteration 1 {tensor_key.slot}", 0),
                values,
            )
            for tensor_key, values in routed(*best)
        ]

    result = compare_tensors(tmp_path, [(rank(), earlier(1, 1))], earlier(0, 0))
    assert (result.wrong(), result.routing_flips, result.seen) == ([], 1, 0)


def updated(moved, average=WHOLE):
    """A weight that moved, and the square of its gradient."""
    at = place((0, 0, 0))
    return [
        (TensorKey(CaptureStage.OPTIMIZER_STATE, WEIGHT, "exp_avg_sq"), average**2, at),
        (weights(), 1000 * WHOLE, at),
        (weights(slot="update"), moved, at),
    ]


def test_missing_update_of_one_weight_is_wrong(tmp_path):
    moved = np.full_like(WHOLE, 0.01)
    missing = moved * (np.arange(12).reshape(4, 3) != 7)
    assert not compare_tensors(tmp_path, [(rank(), updated(moved))], updated(moved)).wrong()
    (wrong,) = compare_tensors(tmp_path / "m", [(rank(), updated(missing))], updated(moved)).wrong()
    assert wrong.key == (CaptureStage.WEIGHTS, WEIGHT, "update")
    assert wrong.ratio > 1000


@pytest.mark.parametrize(
    ("response", "times", "differs"),
    [(0.1, -1, True), (0.3, -1, False), (0.3, -5, False), (0.3, 10, True)],
)
def test_update_that_is_all_rounding_may_have_any_direction_but_not_be_far_larger(
    tmp_path, response, times, differs
):
    moved = np.full_like(WHOLE, 0.01)
    reference = write(tmp_path / "reference", [(rank(), updated(moved))], response)
    layout = write(tmp_path / "layout", [(rank(), updated(times * moved))])
    assert bool(compare(reference, layout).wrong()) is differs


@pytest.mark.parametrize(("reached", "differs"), [(0.0, True), (1.0, False)])
def test_update_that_is_all_rounding_is_compared_with_earlier_updates(tmp_path, reached, differs):
    moved = np.full_like(WHOLE, 0.01)
    reach = (weights(slot=UPDATE_MAGNITUDE), np.full_like(WHOLE, reached), place((0, 0, 0)))
    reference_tensors = [(rank(), [*updated(moved), reach])]
    reference = write(tmp_path / "reference", reference_tensors, response=0.3)
    layout = write(tmp_path / "layout", [(rank(), updated(10 * moved))])
    assert bool(compare(reference, layout).wrong()) is differs


def test_weight_that_starts_at_zero_may_be_moved_by_an_update_of_rounding(tmp_path):
    one_is_rounding = np.where(np.arange(12).reshape(4, 3) == 7, 1e-9, 1).astype(np.float32)
    moved = np.full_like(WHOLE, 0.01)

    def ended(moves):
        return [
            *updated(moves, one_is_rounding)[:1],
            *((weights(slot=slot), moves, place((0, 0, 0))) for slot in ("weight", "update")),
        ]

    other_way = moved * np.where(one_is_rounding < 1, -1, 1).astype(np.float32)
    assert not compare_tensors(tmp_path, [(rank(), ended(other_way))], ended(moved)).wrong()
    (*_, wrong) = compare_tensors(
        tmp_path / "m", [(rank(), ended(2 * moved))], ended(moved)
    ).wrong()
    assert wrong.key == (CaptureStage.WEIGHTS, WEIGHT, "update")


def test_weight_without_second_moment_gets_the_largest_response_of_its_slot(tmp_path):
    other = TensorKey(CaptureStage.WEIGHTS, "decoder.layers.1.mlp.linear_fc2.weight", "weight")
    both = [(weights(), WHOLE, place((0, 0, 0))), (other, WHOLE, place((1, 0, 0)))]
    reference = write(tmp_path / "r", [(rank(), both)])
    key = f"{other.stage}|{other.name}|{other.slot}"
    (tmp_path / "r" / "rank-0" / RESPONSES_FILE).write_text(json.dumps({key: 1e-3}))
    apart = [(tensor_key, values * np.float32(1.002), at) for tensor_key, values, at in both]
    assert not compare(reference, write(tmp_path / "a", [(rank(), apart)])).wrong()


def heads(name, slot, *shares):
    """Gradients of keys on as many tensor-parallel ranks, which have a head of the sequence each."""
    tensor_key = TensorKey(
        CaptureStage.ACTIVATION_GRADIENTS, f"decoder.layers.0.self_attention.{name}", slot, 0
    )
    ranks = [
        (rank(number, tensor=(number, len(shares)), world_size=len(shares)), [(tensor_key, share)])
        for number, share in enumerate(shares)
    ]
    return ranks, tensor_key


def test_ranks_that_share_a_key_head_have_terms_of_its_gradient(tmp_path):
    first, second = random(SEQUENCE, BATCH, 1, 4), random(SEQUENCE, BATCH, 1, 4, seed=1)
    both = np.concatenate([first, second], 2)
    share = random(SEQUENCE, BATCH, 1, 4, seed=2)
    for name, slot in (
        ("core_attention", "input.key"),
        ("core_attention", "input.value"),
        ("k_layernorm", "output"),
    ):
        ours, tensor_key = heads(name, slot, first - share, share, second - share, share)
        assert not compare_tensors(tmp_path / f"{name} {slot}", ours, [(tensor_key, both)]).wrong()
        lacking, tensor_key = heads(name, slot, first - share, share, second - share, 0 * share)
        (wrong,) = compare_tensors(
            tmp_path / f"- {name} {slot}", lacking, [(tensor_key, both)]
        ).wrong()
        assert wrong.wrong_ranks == {2, 3}


def test_query_gradients_are_not_summed_over_ranks(tmp_path):
    ours, tensor_key = heads(
        "core_attention", "input.query", *2 * [random(SEQUENCE, BATCH, 1, 4) / 2]
    )
    (wrong,) = compare_tensors(tmp_path, ours, [(tensor_key, 2 * ours[0][1][0][1])]).wrong()
    assert wrong.wrong_ranks == {0, 1}


def test_missing_optimizer_state_of_an_existing_parameter_is_wrong(tmp_path):
    other, stage = "decoder.layers.0.mlp.linear_fc1", CaptureStage.OPTIMIZER_STATE
    at = Placement("decoder.layers.mlp.linear_fc1.weight", (1, 4, 3), (0, 0, 0))
    reference_tensors = [
        (weights(stage, "exp_avg"), WHOLE, place((0, 0, 0))),
        (TensorKey(stage, f"{other}.weight", "exp_avg"), WHOLE, at),
        *whole(),
        (TensorKey(CaptureStage.WEIGHTS, f"{other}.weight", "weight"), WHOLE, at),
    ]
    (wrong,) = compare_tensors(
        tmp_path, [(rank(), reference_tensors[:1] + reference_tensors[2:])], reference_tensors
    ).wrong()
    assert (wrong.key, wrong.uncovered) == ((stage, f"{other}.weight", "exp_avg"), 12)


def test_tensor_that_no_rank_has_is_listed_and_counted(tmp_path):
    reference_tensors = [(output("a"), WHOLE), (output("b"), WHOLE), *whole()]
    result = compare_tensors(tmp_path, [(rank(), reference_tensors[:1])], reference_tensors)
    assert (result.wrong(), result.compared, result.seen) == ([], 1, 3)
    (line,) = result.not_aligned
    assert line == f"{WEIGHT} (weights weight) b output: no rank of the strategy has it"


def test_slot_that_the_strategy_captured_nowhere_is_listed_with_this_reason(tmp_path):
    stage = CaptureStage.OPTIMIZER_STATE
    reference_tensors = [(weights(stage, "exp_avg"), WHOLE, place((0, 0, 0))), *whole()]
    result = compare_tensors(tmp_path, [(rank(), whole())], reference_tensors)
    (line,) = result.not_aligned
    reason = "the strategy captured no such tensor of any parameter"
    assert line == f"{WEIGHT} ({stage} exp_avg): {reason}"


def begun(off, reach=0.01):
    """A weight that the iteration begins with, and how far the reference's updates reached."""
    at = place((0, 0, 0))
    return [
        (weights(slot=UPDATE_MAGNITUDE), np.full_like(WHOLE, 1) * np.float32(reach), at),
        (weights(slot=START_WEIGHT), WHOLE + np.float32(off), at),
    ]


def test_wrong_weight_at_the_start_is_the_first_error(tmp_path):
    ours = [(output(), WHOLE + 1), *begun(1e-4)]
    result = compare_tensors(tmp_path, [(rank(), ours)], [(output(), WHOLE), *begun(0)])
    assert [comparison.key[2] for comparison in result.wrong()] == [START_WEIGHT, "output"]
    assert (result.compared, result.seen) == (2, 2)  # How far it had moved is no tensor of its own.


def test_weight_whose_earlier_gradients_were_rounding_may_start_elsewhere(tmp_path):
    third = np.arange(12).reshape(4, 3) % 3 == 1
    reach = np.where(third, 1e6, 0.01).astype(np.float32)
    ours = [(rank(), begun(np.where(third, 0.01, 0), reach))]
    assert not compare_tensors(tmp_path, ours, begun(0, reach)).wrong()


def test_weight_copies_that_start_one_bit_apart_are_wrong(tmp_path):
    near = np.nextafter(WHOLE, np.float32(9)) - WHOLE
    ours = [
        (rank(number, data=(number, 2), world_size=2), begun(number * near)) for number in (0, 1)
    ]
    (wrong, *_) = compare_tensors(tmp_path, ours, begun(0)).wrong()
    assert (wrong.key[2], wrong.replicas_differ) == (START_WEIGHT, (0, 1))


@pytest.mark.parametrize(
    ("stage", "slot", "holds"),
    [
        (CaptureStage.OPTIMIZER_STATE, "exp_avg", True),
        (CaptureStage.WEIGHTS, "weight", True),
        (CaptureStage.REDUCED_GRADIENTS, "gradient", False),
    ],
)
def test_weights_and_states_may_differ_by_six_times_the_measured_drift(
    tmp_path, stage, slot, holds
):
    at = place((0, 0, 0))

    def run(name, off):
        values = [(weights(stage, slot), WHOLE * np.float32(1 + off), at)]
        return write(tmp_path / name, [(rank(), values)])

    reference, ours = run("reference", 0), run("ours", 1e-3)
    assert compare(reference, ours).wrong()
    measured = measure_drift(reference, [run("a", 1e-5), run("b", 2e-4)])
    assert bool(compare(reference, ours, measured).wrong()) is not holds


def test_fp16_overflow_is_skipped_if_the_reference_skips_its_step(tmp_path):
    at, beyond = place((0, 0, 0)), WHOLE * np.float32(np.inf)
    fields = {"dtype": "float16"}
    gradients = weights(CaptureStage.REDUCED_GRADIENTS, "gradient")

    def judged(name, reference_tensors):
        ours = [(rank(**fields), [(gradients, beyond, at)])]
        return compare_tensors(
            tmp_path / name, ours, [(gradients, reference_tensors, at)], **fields
        )

    (skipped,) = judged("skipped", -beyond).not_aligned
    assert "--initial-loss-scale" in skipped
    assert judged("taken", WHOLE).wrong()


@pytest.mark.parametrize("changed", [0.5 * RESPONSES * 1e-6, 0.5])
def test_gradient_that_changes_without_probes_is_wrong(tmp_path, changed):
    at = place((0, 0, 0))
    tensor_keys = [
        weights(CaptureStage.REDUCED_GRADIENTS, "gradient"),
        weights(CaptureStage.OPTIMIZER_STATE, "exp_avg"),
        weights(slot=START_WEIGHT),
    ]
    reference, ours = (
        write(
            tmp_path / name,
            [(rank(), [(tensor_key, WHOLE + off, at) for tensor_key in tensor_keys])],
        )
        for name, off in (("reference", 0), ("ours", 1))
    )
    key = f"{CaptureStage.REDUCED_GRADIENTS}|{WEIGHT}|gradient"
    (ours.ranks[0].folder / UNOBSERVED_FILE).write_text(json.dumps({key: changed}))
    names = [comparison.key[2] for comparison in compare(reference, ours).wrong()]
    unobserved = [UNOBSERVED_GRADIENT] if changed == 0.5 else []
    assert names == [START_WEIGHT, "gradient", *unobserved, "exp_avg"]


def test_tokens_per_expert_are_summed_over_the_ranks_that_route(tmp_path):
    router, counts = "decoder.layers.0.mlp.router", np.array([3.0, 5.0], np.float32)
    tensor_key = TensorKey(CaptureStage.OUTPUTS, router, COUNTS)

    def judged(name, *ours, **split):
        ranks = [
            (
                rank(number, world_size=2, **dict.fromkeys(split, (number, 2))),
                [(tensor_key, tensors)],
            )
            for number, tensors in enumerate(ours)
        ]
        return compare_tensors(tmp_path / name, ranks, [(tensor_key, counts)]).wrong()

    assert not judged("data", counts - 1, 0 * counts + 1, data=2)
    assert not judged("tensor", counts, counts, tensor=2)
    (wrong,) = judged("twice", counts, counts, data=2)
    assert wrong.key == (CaptureStage.OUTPUTS, router, COUNTS)


def test_zero_weight_without_updates_must_start_at_zero(tmp_path):
    at = place((0, 0, 0))
    zeros = [(weights(slot=slot), 0 * WHOLE, at) for slot in (UPDATE_MAGNITUDE, START_WEIGHT)]
    assert not compare_tensors(tmp_path, [(rank(), zeros)], zeros).wrong()
    other = [(weights(slot=START_WEIGHT), 0 * WHOLE + 1e-9, at)]
    assert compare_tensors(tmp_path / "o", [(rank(), other)], zeros).wrong()


def test_parameters_that_start_with_one_value_are_counted(tmp_path):
    same, other = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)

    def constants(name, *values, slot=START_WEIGHT):
        ranks = [
            (
                rank(number, tensor=(number, 2), world_size=2),
                [(weights(slot=slot), value, place((0, 2 * number, 0)))],
            )
            for number, value in enumerate(values)
        ]
        written = write(tmp_path / name, ranks)
        return compare(written, written).constant

    assert constants("same", same, same) == 1
    assert constants("apart", same, other) == 0
    assert constants("no start", same, same, slot="weight") is None


@pytest.mark.parametrize("stale", [False, True])
def test_weights_that_are_not_their_rounded_master_copy_are_wrong_without_a_reference(
    tmp_path, stale
):
    # Two ranks hold a half of the master copy each, as the distributed optimizer does.
    master = random(1, 4, 3)
    rounded = round_to_dtype(master, "bfloat16")[0]
    held = rounded.copy()
    if stale:
        # As far as one rounding error, which is within the tolerance of bf16.
        held[1, 2] *= np.float32(1 + 2.0**-7)
    weight = TensorKey(CaptureStage.WEIGHTS, WEIGHT, "weight")
    copy = TensorKey(CaptureStage.OPTIMIZER_STATE, WEIGHT, "param")
    ours = []
    for number, rows in enumerate((slice(0, 2), slice(2, 4))):
        half = np.full_like(master[0], np.nan)
        half[rows] = master[0, rows]
        partial = Placement(KEY, (1, 4, 3), (0, 0, 0), partial=True)
        described = rank(number, world_size=2, data=(number, 2), dtype="bfloat16")
        ours.append((described, [(copy, half, partial)]))
    strategy = write(tmp_path / "strategy", ours)
    for number in range(2):
        with CaptureWriter(tmp_path / "bf16" / f"rank-{number}") as writer:
            values = encode_tensor(held, "bfloat16")
            writer.add(weight, "bfloat16", (4, 3), values, place((0, 0, 0)))
            capture = strategy.ranks[number]
            record = capture.records[0]
            stored = memoryview(capture.tensor_bytes(record))
            writer.add(copy, "float32", record.shape, stored, record.placement)
            average = TensorKey(CaptureStage.OPTIMIZER_STATE, WEIGHT, "exp_avg")
            halved = np.ascontiguousarray(capture.values(record) / 2)
            halved_bytes = memoryview(halved.ravel().view(np.uint8))
            writer.add(average, "float32", record.shape, halved_bytes, record.placement)
            writer.close(ours[number][0])
        (tmp_path / "bf16" / f"rank-{number}" / RESPONSES_FILE).write_text("{}")
    strategy = read_capture(tmp_path / "bf16")
    comparisons = compare(strategy, strategy).comparisons
    wrong = [comparison for comparison in comparisons if comparison.differs]
    assert [comparison.key[2] for comparison in wrong] == ([MASTER_CAST] if stale else [])
    if stale:
        assert wrong[0].wrong_ranks == {0, 1}
        assert wrong[0].fault == "not the rounded master copy in 8.3% of its elements"
