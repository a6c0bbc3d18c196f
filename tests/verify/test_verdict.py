import json
from xml.etree import ElementTree

import numpy as np
import pytest

from parakit.artifacts.capture import RANK_FILE, START_WEIGHT, CaptureStage, TensorKey
from parakit.verify.captured import VerifyError, read_capture
from parakit.verify.tolerance import RESPONSES
from parakit.verify.verdict import (
    confirm,
    count_seeds,
    judge,
    refuse_comparison,
    write_forced,
    write_verdict,
)
from tests.verify.captures import MODULE, WEIGHT, output, pair, place, random, rank, write

WHOLE = random(8, 2, 6)
LATER = "decoder.layers.1"


def test_a_difference_is_located_with_its_kind_and_source(tmp_path):
    ours = [
        (rank(n, tensor=(n, 2), world_size=2), [(output(), values)])
        for n, values in enumerate((WHOLE * 2, WHOLE * 2))
    ]
    judgement = judge(*pair(tmp_path, ours, [(output(), WHOLE)]))
    write_verdict(tmp_path / "v", judgement)
    written = json.loads((tmp_path / "v" / "verdict.json").read_text())
    assert {name: written[name] for name in ("verdict", "stage", "module", "ranks", "factor")} == {
        **{"verdict": "differs", "stage": "outputs", "module": MODULE, "ranks": [0, 1]},
        "factor": 2.0,
    }
    assert written["source"] == "megatron/core/layers.py:7"
    assert (judgement.verdict.exit_code, written["compared"]) == (1, 2)
    assert written["worst"].startswith("worst at [")
    (case,) = ElementTree.parse(tmp_path / "v" / "junit.xml").getroot()
    assert case[0].tag == "failure"
    assert case[0].get("message") == judgement.verdict.line
    assert (
        f"{MODULE} (output): factor ×TP; megatron/core/layers.py:7; worst" in judgement.verdict.line
    )
    kept = np.load(tmp_path / "v" / "first.npz")
    assert np.array_equal(kept["ours"], WHOLE * 2)


@pytest.mark.parametrize(
    ("num_wrong", "kind"),
    [
        (1, "just above tolerance (1.49), in 1 of 3 seeds"),
        (3, "factor 1.00001; just above tolerance (1.49), in 3 of 3 seeds"),
    ],
)
def test_near_the_tolerance_a_kind_is_named_only_if_every_seed_is_wrong(tmp_path, num_wrong, kind):
    # The response of 1e-6 gives a tolerance of 6e-6.
    ours = [(rank(), [(output(), WHOLE * np.float32(1 + 9e-6))])]
    judgement = judge(*pair(tmp_path, ours, [(output(), WHOLE)]))
    assert judgement.is_near_tolerance
    counted = count_seeds(judgement, num_wrong, num_seeds=3)
    assert counted.verdict.kind == kind
    assert f"(output): {kind}" in counted.verdict.line


def test_an_error_of_twice_its_tolerance_or_in_exact_values_is_not_near_the_tolerance(tmp_path):
    for number, (ours, reference_tensors) in enumerate(
        [(WHOLE * np.float32(1 + 2e-5), WHOLE), (np.arange(4) + 1, np.arange(4)), (WHOLE, WHOLE)]
    ):
        folder = tmp_path / f"{number}"
        judgement = judge(
            *pair(folder, [(rank(), [(output(), ours)])], [(output(), reference_tensors)])
        )
        assert not judgement.is_near_tolerance


def test_one_bug_does_not_hide_another_and_what_follows_from_it_is_not_listed(tmp_path):
    modules = (MODULE, "decoder.layers.0.mlp", "decoder.layers.1.input_layernorm", LATER)
    first, around, norm, layer = (output(name) for name in modules)
    norms = (output(modules[2], slot="input.x"), norm)
    gradients = [
        TensorKey(stage, f"{name}.weight", "gradient")
        for stage in (CaptureStage.LOCAL_GRADIENTS, CaptureStage.REDUCED_GRADIENTS)
        for name in (MODULE, "decoder.final_layernorm")
    ]
    held = [(tensor_key, WHOLE) for tensor_key in (first, around, *norms, layer)]
    placed = [
        (tensor_key, random(4, 3), place((n, 0, 0), (9, 4, 3)))
        for n, tensor_key in enumerate(gradients)
    ]

    def run(name, *wrong):
        ours = [
            (tensor_key, values + (tensor_key in wrong), *at)
            for tensor_key, values, *at in (*held, *placed)
        ]
        return write(tmp_path / name, [(rank(), ours)])

    reference = run("reference")
    ours = run("ours", first, around, *norms, layer, *gradients)
    # The norm is given what is right; the final norm's own gradient is right before it is reduced.
    forced = run("forced", first, around, norm, gradients[0], gradients[2], gradients[3])
    confirmed = confirm(judge(reference, ours), reference, forced).verdict
    assert confirmed.module == MODULE
    assert [line.split(" (")[0] for line in confirmed.also] == [
        f"outputs, {modules[2]}",
        "reduced gradients, decoder.final_layernorm.weight",
    ]


def test_module_that_is_wrong_by_itself_is_named_if_the_first_error_follows_from_it(tmp_path):
    first, second = output(slot="input.x"), output(LATER)
    reference_tensors = [(first, WHOLE), (second, WHOLE)]
    reference, layout = pair(
        tmp_path, [(rank(), [(first, WHOLE + 1), (second, WHOLE + 1)])], reference_tensors
    )
    judgement = judge(reference, layout)
    assert judgement.may_have_spread
    # With the reference's tensors as inputs only the second is wrong.
    again = write(tmp_path / "forced", [(rank(), [(first, WHOLE), (second, WHOLE + 1)])])
    verdict = confirm(judgement, reference, again).verdict
    assert (verdict.module, verdict.confirmed) == (LATER, True)
    none = write(tmp_path / "none", [(rank(), [(first, WHOLE), (second, WHOLE)])])
    verdict = confirm(judgement, reference, none).verdict
    assert (verdict.module, verdict.confirmed) == (MODULE, False)


@pytest.mark.parametrize(
    ("around", "name"),
    [(WHOLE, "decoder.layers.0.mlp"), (WHOLE + 1, MODULE)],
)
def test_wrong_input_is_charged_to_the_parent_module_if_its_input_is_right(tmp_path, around, name):
    outer, inner = output("decoder.layers.0.mlp", slot="input.x"), output(slot="input.x")
    third = output(LATER, slot="input.x")
    reference_tensors = [(third, WHOLE), (inner, WHOLE), (outer, WHOLE)]
    ours = [(rank(), [(third, WHOLE), (inner, WHOLE + 1), (outer, around)])]
    assert judge(*pair(tmp_path, ours, reference_tensors)).verdict.module == name


def test_wrong_input_of_an_outermost_module_is_charged_to_the_model(tmp_path):
    outer = output("model", slot="input.x", stage=CaptureStage.INPUTS)
    inner = output("embedding", slot="input.x")
    ours = [(rank(), [(outer, WHOLE), (inner, WHOLE + 1)])]
    judgement = judge(*pair(tmp_path, ours, [(outer, WHOLE), (inner, WHOLE)]))
    assert judgement.verdict.module == "model"


def test_wrong_input_is_charged_to_the_calling_module(tmp_path):
    caller = output("mtp.layers.0", slot="input.x")
    inner = output("embedding", slot="input.x@mtp.layers.0")
    plain = output("embedding", slot="input.x")
    reference_tensors = [(plain, WHOLE), (caller, WHOLE), (inner, WHOLE)]
    ours = [(rank(), [(plain, WHOLE), (caller, WHOLE), (inner, WHOLE + 1)])]
    assert judge(*pair(tmp_path, ours, reference_tensors)).verdict.module == "mtp.layers.0"


def test_wrong_weight_at_the_start_is_of_the_iteration_before(tmp_path):
    begin = TensorKey(CaptureStage.WEIGHTS, WEIGHT, START_WEIGHT)
    parts = [
        (begin, np.ones((4, 3), np.float32), place((0, 0, 0))),
        (
            TensorKey(CaptureStage.OPTIMIZER_STATE, WEIGHT, "exp_avg_sq"),
            WHOLE[:4, 0, :3] ** 2,
            place((0, 0, 0)),
        ),
    ]
    moved = [(begin, parts[0][1] * 2, parts[0][2]), parts[1]]
    reference, layout = pair(
        tmp_path, [(rank(), [*moved, (output(), WHOLE + 1)])], [*parts, (output(), WHOLE)]
    )
    judgement = judge(reference, layout)
    verdict = judgement.verdict
    assert (verdict.stage, verdict.tensor, verdict.iteration) == (
        CaptureStage.WEIGHTS,
        START_WEIGHT,
        1,
    )
    assert judgement.begins_before
    write_forced(reference, layout, tmp_path / "given", start_alone=True)
    (forced,) = read_capture(tmp_path / "given").ranks
    assert [record.tensor_key for record in forced.records] == [begin]
    assert (forced.values(forced.records[0]) == 1).all()


@pytest.mark.parametrize(("times", "outcome"), [(1.5, "held"), (3, "differs")])
def test_error_that_no_module_makes_is_wrong_only_above_twice_the_tolerance(
    tmp_path, times, outcome
):
    values = np.ones(4, np.float32)
    reference = write(tmp_path / "r", [(rank(), [(output(), values)])], response=1e-3)
    off = values * np.float32(1 + times * RESPONSES * 1e-3)
    layout = write(tmp_path / "o", [(rank(), [(output(), off)])])
    forced = write(tmp_path / "f", [(rank(), [(output(), values)])])
    verdict = confirm(judge(reference, layout), reference, forced).verdict
    assert verdict.verdict == outcome
    assert (verdict.added_up is None) == (outcome == "differs")
    if outcome == "held":
        assert "at 1.50" in verdict.sentence


def test_wrong_input_of_a_layer_is_charged_to_the_layer(tmp_path):
    tensor_key = output(LATER, slot="input.x")
    judgement = judge(*pair(tmp_path, [(rank(), [(tensor_key, WHOLE + 1)])], [(tensor_key, WHOLE)]))
    assert judgement.verdict.module == LATER


def test_forced_tensor_is_the_part_that_the_rank_holds(tmp_path):
    tensor_key = output(slot="input.x")
    ours = [
        (rank(n, tensor=(n, 2), world_size=2), [(tensor_key, np.zeros((8, 2, 3), np.float32))])
        for n in range(2)
    ]
    reference, layout = pair(tmp_path, ours, [(tensor_key, WHOLE)])
    write_forced(reference, layout, tmp_path / "given")
    forced = read_capture(tmp_path / "given")
    assert np.array_equal(forced.ranks[1].values(forced.ranks[1].records[0]), WHOLE[..., 3:])


def test_runs_of_different_work_are_refused_with_the_setting_that_differs(tmp_path):
    ours = [(rank(micro_batches=3), [(output(), WHOLE)])]
    with pytest.raises(VerifyError, match="global batch is 6 in layout and 2 in reference"):
        judge(*pair(tmp_path, ours, [(output(), WHOLE)]))


@pytest.mark.parametrize(("per_token", "refused_for"), [(False, "from 5 to 16 tokens"), (True, "")])
def test_other_micro_batch_sizes_are_refused_if_token_counts_are_unequal(
    tmp_path, per_token, refused_for
):
    def tokens(*numbers):
        tensor_keys = [
            TensorKey(CaptureStage.LOSS, "loss", "tokens", number) for number in range(len(numbers))
        ]
        return [
            (tensor_key, np.float32(n)) for tensor_key, n in zip(tensor_keys, numbers, strict=True)
        ]

    shared = {"per_token_loss": per_token}
    ours = [(rank(micro_batch_size=4, **shared), tokens(21))]
    captures = pair(tmp_path, ours, tokens(16, 5), micro_batches=2, **shared)
    if refused_for:
        with pytest.raises(VerifyError, match=refused_for):
            judge(*captures)
    else:
        assert judge(*captures).verdict.exit_code == 0


def test_a_capture_that_was_cut_off_or_is_not_there_is_refused(tmp_path):
    write(tmp_path / "c", [(rank(n, world_size=2), [(output(), WHOLE)]) for n in range(2)])
    (tmp_path / "c" / "rank-1" / RANK_FILE).unlink()
    with pytest.raises(VerifyError, match=r"was cut off \(rank-1 did not finish"):
        read_capture(tmp_path / "c")
    with pytest.raises(VerifyError, match="no captured tensors"):
        read_capture(tmp_path / "nothing")


def test_nothing_compared_exits_with_two():
    assert refuse_comparison("The strategy ended 'crashed'").verdict.exit_code == 2


def test_a_gradient_is_forced_as_bf16_where_the_run_is_bf16(tmp_path):
    tensor_key = output(stage=CaptureStage.ACTIVATION_GRADIENTS)
    bits = np.array([0x3F80, 0x4049], np.uint16)  # 1 and 3.140625
    writer_values = bits.view(np.uint16)
    for name in ("reference", "layout"):
        write(tmp_path / name, [(rank(dtype="bfloat16"), [(tensor_key, writer_values)])])
        index = tmp_path / name / "rank-0" / "index.jsonl"
        index.write_text(index.read_text().replace("uint16", "bfloat16"))
    reference, layout = read_capture(tmp_path / "reference"), read_capture(tmp_path / "layout")
    assert reference.ranks[0].values(reference.ranks[0].records[0]).tolist() == [1, 3.140625]
    write_forced(reference, layout, tmp_path / "given")
    forced_bytes = (tmp_path / "given" / "rank-0" / "tensors.bin").read_bytes()
    assert forced_bytes == bits.tobytes()


@pytest.mark.parametrize(("of_loss", "name"), [(WHOLE, "loss"), (None, "output_layer")])
def test_wrong_gradient_of_the_logits_is_charged_to_the_loss_if_its_gradient_is_right(
    tmp_path, of_loss, name
):
    gradients = CaptureStage.ACTIVATION_GRADIENTS
    logits = output("output_layer", stage=gradients)
    token = output("loss", stage=gradients, slot="of each token")
    both = [] if of_loss is None else [(token, of_loss)]
    ours = [(rank(), [(output(), WHOLE), *both, (logits, WHOLE + 1)])]
    judgement = judge(*pair(tmp_path, ours, [(output(), WHOLE), *both, (logits, WHOLE)]))
    assert judgement.verdict.module == name


@pytest.mark.parametrize(
    ("stage", "slot", "data", "name"),
    [
        (CaptureStage.LOCAL_GRADIENTS, "gradient", 1, "megatron/core/layers.py:7"),
        (CaptureStage.REDUCED_GRADIENTS, "gradient", 1, "finalize"),
        (CaptureStage.REDUCED_GRADIENTS, "gradient", 2, "reduce"),
        (CaptureStage.OPTIMIZER_STATE, "exp_avg", 1, "step"),
        (CaptureStage.OPTIMIZER_STATE, "learning rate", 1, "groups"),
        (CaptureStage.WEIGHTS, "buffer", 1, "finalize"),
    ],
)
def test_source_of_a_tensor_without_module_is_that_of_its_function(
    tmp_path, stage, slot, data, name
):
    functions = {
        CaptureStage.REDUCED_GRADIENTS.value: "finalize",
        "buckets": "reduce",
        CaptureStage.OPTIMIZER_STATE.value: "step",
        "learning rate": "groups",
    }
    values, tensor_key = random(4, 3), TensorKey(stage, WEIGHT, slot)
    ours = [
        (
            rank(number, data=(number, data), world_size=data, functions=functions),
            [(tensor_key, values + 1, place((0, 0, 0)))],
        )
        for number in range(data)
    ]
    reference_tensors = [(tensor_key, values, place((0, 0, 0)))]
    captures = pair(tmp_path, ours, reference_tensors, micro_batches=data)
    assert judge(*captures).verdict.source == name


def test_dropout_is_refused_if_the_layouts_draw_different_masks(
    tmp_path,
):
    dropping = {"hidden_dropout": 0.1, "attention_dropout": 0.0}
    ours = [(rank(tensor=(0, 2), **dropping), [(output(), WHOLE)])]
    with pytest.raises(VerifyError, match=r'--hidden-dropout is 0.1.*EXTRA="--hidden-dropout 0'):
        judge(*pair(tmp_path, ours, [(output(), WHOLE)], **dropping))
    same = [(rank(**dropping), [(output(), WHOLE)])]
    assert judge(*pair(tmp_path / "s", same, [(output(), WHOLE)], **dropping)).first is None


def test_wrong_loss_after_right_outputs_needs_no_second_run(tmp_path):
    tensor_key = output("loss", stage=CaptureStage.LOSS, slot="of each token")
    judgement = judge(*pair(tmp_path, [(rank(), [(tensor_key, WHOLE + 1)])], [(tensor_key, WHOLE)]))
    assert judgement.verdict.stage is CaptureStage.LOSS
    assert not judgement.may_have_spread


def test_model_without_any_aligned_module_is_refused(tmp_path):
    ours = [(rank(), [(output("other.module"), WHOLE), (output(stage=CaptureStage.LOSS), WHOLE)])]
    with pytest.raises(
        VerifyError, match=r"None of the modules.*other\.module output: the reference"
    ):
        judge(*pair(tmp_path, ours, [(output(), WHOLE), (output(stage=CaptureStage.LOSS), WHOLE)]))


def test_routing_flips_force_only_the_choices_of_experts(tmp_path):
    router = "decoder.layers.0.mlp.router"
    tensor_keys = [output(router, slot=slot) for slot in ("input.x", "scores", "choice")]

    def tensors(best):
        return list(zip(tensor_keys, (WHOLE, np.ones((1, 2), np.float32), best), strict=True))

    first, second = np.array([[True, False]]), np.array([[False, True]])
    reference, layout = pair(tmp_path, [(rank(), tensors(second))], tensors(first))
    assert judge(reference, layout).needs_same_start
    write_forced(reference, layout, tmp_path / "given", start_alone=True)
    (forced,) = read_capture(tmp_path / "given").ranks
    assert [record.tensor_key for record in forced.records] == tensor_keys[2:]
    assert np.array_equal(forced.values(forced.records[0]), first)


@pytest.mark.parametrize(
    ("ours", "reference_tensors", "largest", "sentence"),
    [
        ((64.0, 64.0), (64.0, 64.0), 1.0, None),
        ((64.0, 32.0), (64.0, 64.0), 1.0, "in iteration 1 gradients overflow in one of them alone"),
        ((64.0, 64.0), (32.0, 32.0), 1.0, "the first loss scale is"),
        ((64.0, 64.0), (64.0, 64.0), 40_000.0, "in iteration 2 gradients overflow"),
    ],
)
def test_steps_that_one_run_alone_skips_in_fp16_are_not_compared(
    tmp_path, ours, reference_tensors, largest, sentence
):
    """Where a gradient is far from fp16's largest number, one that is infinite is wrong."""

    def run(name, scales, values):
        tensor_key = TensorKey(CaptureStage.REDUCED_GRADIENTS, WEIGHT, "gradient")
        gradient = (tensor_key, np.full((4, 3), values, np.float32), place((0, 0, 0)))
        described = rank(dtype="float16", loss_scales=scales)
        return write(tmp_path / name, [(described, [(output(), WHOLE), gradient])])

    reference, layout = run("reference", reference_tensors, largest), run("layout", ours, np.inf)
    if sentence is None:
        assert judge(reference, layout).verdict.kind == "not finite"
        return
    with pytest.raises(VerifyError, match=sentence):
        judge(reference, layout)
