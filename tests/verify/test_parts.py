import numpy as np
import pytest

from parakit.artifacts.capture import GRADIENT_PART_PREFIX, CaptureStage, TensorKey
from parakit.verify.comparison import ComparedTensor
from parakit.verify.kinds import classify_by_parts
from parakit.verify.parts import (
    BEFORE,
    explain_by_parts,
    is_right_without_loss,
    name_wrong_loss,
    needs_parts,
)
from parakit.verify.verdict import judge
from tests.verify.captures import WEIGHT, place, random, rank, write

MAIN, AUXILIARY = random(4, 3), np.float32(0.01) * random(4, 3, seed=1)
LAYOUT = rank(tensor=(0, 2), data=(0, 3), micro_batches=5)


def kind(ours, parts, extra=""):
    reference = np.sum([part for name, part in parts.items() if name != extra], axis=0)
    error = classify_by_parts(ComparedTensor(0, None, ours, reference), 1e-6, parts, LAYOUT, extra)
    return error and error.name


@pytest.mark.parametrize(
    ("scale", "name"),
    [(2, "auxiliary loss ×TP"), (3, "auxiliary loss ×DP"), (1 / 5, "auxiliary loss ÷micro batches"),
     (0, "without auxiliary loss"), (1.7, "auxiliary loss ×1.7")],
)  # fmt: skip
def test_scaled_part_is_named_with_its_factor(scale, name):
    ours = MAIN + np.float32(scale) * AUXILIARY
    assert kind(ours, {"main loss": MAIN, "auxiliary loss": AUXILIARY}) == name


def test_noise_is_not_explained_by_parts():
    ours = MAIN + random(4, 3, seed=2)
    assert kind(ours, {"main loss": MAIN, "auxiliary loss": AUXILIARY}) is None


def test_several_wrong_parts_are_named_and_an_extra_part_is_named_alone():
    parts = {f"micro batch {n}": random(4, 3, seed=n) for n in range(3)}
    assert kind(parts["micro batch 2"], parts) == "without micro batch 0, micro batch 1"
    assert kind(MAIN + AUXILIARY, {"this iteration": MAIN, BEFORE: AUXILIARY}, BEFORE) == (
        f"{BEFORE} on top"
    )


GRADIENT = TensorKey(CaptureStage.REDUCED_GRADIENTS, WEIGHT, "gradient")


def reduced(folder, values, *more):
    """A rank alone with one reduced gradient, and further (tensor key, values) of its place."""
    tensors = [(GRADIENT, values, place((0, 0, 0)))]
    return write(folder, [(rank(), [*tensors, *((*entry, place((0, 0, 0))) for entry in more)])])


def test_scaled_auxiliary_loss_is_found_with_a_run_without_it(tmp_path):
    reference = reduced(tmp_path / "reference", MAIN + AUXILIARY)
    ours = reduced(tmp_path / "ours", MAIN + np.float32(2.5) * AUXILIARY)
    judgement = judge(reference, ours)
    assert needs_parts(judgement)
    without = {"auxiliary loss": reduced(tmp_path / "without", MAIN)}
    verdict = explain_by_parts(judgement, ours, reference, without).verdict
    assert (verdict.kind, verdict.factor) == ("auxiliary loss ×2.5", pytest.approx(2.5, abs=1e-3))


def test_lost_micro_batch_is_named(tmp_path):
    reference = reduced(tmp_path / "reference", MAIN + AUXILIARY)
    ours = reduced(tmp_path / "ours", AUXILIARY)
    parts = [
        (
            TensorKey(
                CaptureStage.LOCAL_GRADIENTS, WEIGHT, f"{GRADIENT_PART_PREFIX}micro batch {n}"
            ),
            values,
        )
        for n, values in enumerate((MAIN, AUXILIARY))
    ]
    parts_capture = reduced(tmp_path / "parts", MAIN + AUXILIARY, *parts)
    explained = explain_by_parts(judge(reference, ours), ours, parts_capture, {})
    assert explained.verdict.kind == "without micro batch 0"


def test_gradient_with_a_known_kind_needs_no_parts(tmp_path):
    reference = reduced(tmp_path / "reference", MAIN)
    judgement = judge(reference, reduced(tmp_path / "ours", 2 * MAIN))
    assert judgement.verdict.kind == "factor 2"
    assert not needs_parts(judgement)


ROUTER_GRADIENT = TensorKey(
    CaptureStage.ACTIVATION_GRADIENTS, "decoder.layers.0.mlp.router", "input.input", 0
)


def backward(folder, values):
    """A rank alone with one activation gradient of one micro batch."""
    return write(folder, [(rank(), [(ROUTER_GRADIENT, values)])])


def test_loss_without_which_everything_is_right_is_named(tmp_path):
    main, auxiliary, other = (random(4, 1, 3, seed=seed) for seed in range(3))
    reference = backward(tmp_path / "reference", main + auxiliary)
    ours = backward(tmp_path / "ours", main + other)
    judgement = judge(reference, ours)
    assert needs_parts(judgement)
    reference_without = backward(tmp_path / "reference-without", main)
    same_without = backward(tmp_path / "same", main)
    assert is_right_without_loss(judgement, same_without, reference_without)
    kind = name_wrong_loss(judgement, "auxiliary loss").verdict.kind
    assert kind == "wrong in the auxiliary loss only"
    also_wrong_without = backward(tmp_path / "wrong", main + other - auxiliary)
    assert not is_right_without_loss(judgement, also_wrong_without, reference_without)
