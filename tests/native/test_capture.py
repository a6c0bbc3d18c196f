"""Captures of the native backend have Megatron's names, placements and order, and do not change training."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from parakit.artifacts.capture import (
    CaptureStage,
    TensorKey,
    read_index,
    read_rank,
)
from parakit.config import variables
from parakit.native.capture import build_native_counterpart, wrap_for_capture
from parakit.native.engines import TorchEngine
from parakit.native.model import GPT, initialise
from parakit.native.parallel import RankLayout
from parakit.native.weights import megatron_name
from parakit.verify.captured import Capture, read_capture
from tests.native.small_model import settings

DENSE: tuple[str, ...] = ("--attention-dropout", "0", "--hidden-dropout", "0")
EXPERTS = (*DENSE, "--num-experts", "4", "--moe-ffn-hidden-size", "8", "--disable-bias-linear")
MUON = (*DENSE, "--optimizer", "muon", "--untie-embeddings-and-output-weights")
BATCHES = [
    (torch.randint(0, 100, (2, 8), generator=torch.Generator().manual_seed(n)),) * 2
    for n in range(2)
]


def trained(*flags: str) -> torch.Tensor:
    """Return all weights after two iterations."""
    chosen = settings(*flags)
    torch.manual_seed(0)
    model = GPT(chosen)
    initialise(model, chosen)
    engine = TorchEngine(model, chosen, RankLayout(0, 1, 1, torch.device("cpu")))
    seen = wrap_for_capture(engine, build_native_counterpart(model), chosen)
    for _ in range(2):
        seen.forward_backward(BATCHES)
        seen.update(1e-2)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@dataclass(frozen=True)
class CapturedTraining:
    """Capture of a training, its folder, and the weights at the end."""

    folder: Path
    weights: torch.Tensor
    capture: Capture


def captured(folder: Path, *flags: str) -> CapturedTraining:
    """Train with a capture of the second iteration, and return the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variables.CAPTURE, str(folder))
        patch.setenv(variables.CAPTURE_ITERATION, "2")
        patch.setenv(variables.CAPTURE_SEEDS, "2")
        weights = trained(*flags)
    return CapturedTraining(folder, weights, read_capture(folder))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> CapturedTraining:
    return captured(tmp_path_factory.mktemp("dense") / "c", *DENSE)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> CapturedTraining:
    return captured(tmp_path_factory.mktemp("experts") / "c", *EXPERTS)


def test_capture_does_not_change_the_trained_weights(
    dense: CapturedTraining, experts: CapturedTraining
) -> None:
    for training, flags in ((dense, DENSE), (experts, EXPERTS)):
        assert len(read_index(training.folder / "rank-0")) > 100
        assert torch.equal(training.weights, trained(*flags))


def test_captured_tensors_have_megatrons_shapes_and_placements(dense: CapturedTraining) -> None:
    (capture_of_rank,) = dense.capture.ranks
    name = "decoder.layers.1.mlp.linear_fc1"
    input_record, output_record = (
        capture_of_rank.first_records[TensorKey(CaptureStage.OUTPUTS, name, slot, 1)]
        for slot in ("input.input_", "output.0")
    )
    assert (input_record.shape, output_record.shape) == ((8, 2, 16), (8, 2, 64))
    weight = capture_of_rank.first_records[
        TensorKey(CaptureStage.WEIGHTS, f"{name}.weight", "weight")
    ]
    assert weight.placement is not None
    assert (
        weight.placement.key,
        weight.placement.global_shape,
        weight.placement.global_offset,
    ) == (
        *("decoder.layers.mlp.linear_fc1.weight", (2, 64, 16)),
        (1, 0, 0),
    )
    gradient = capture_of_rank.first_records[
        TensorKey(CaptureStage.ACTIVATION_GRADIENTS, name, "output.0", 1)
    ]
    assert gradient.shape == output_record.shape


def test_capture_with_seeds_measures_responses_to_rounding(dense: CapturedTraining) -> None:
    responses = dense.capture.responses()
    assert responses[CaptureStage.OUTPUTS, "decoder.layers.1", "output.0"] > 0
    assert responses[CaptureStage.OPTIMIZER_STATE, "decoder.final_layernorm.weight", "exp_avg"] > 0
    assert read_rank(dense.folder / "rank-0").micro_batches == 2


def test_repeated_iteration_restores_the_states_of_muon_and_adamw(tmp_path: Path) -> None:
    responses = captured(tmp_path / "c", *MUON).capture.responses()
    name = "embedding.word_embeddings.weight"
    assert responses[CaptureStage.OPTIMIZER_STATE, name, "step"] == 0
    assert responses[CaptureStage.OPTIMIZER_STATE, name, "exp_avg"] < 1e-5


def test_capture_has_the_update_of_each_weight_and_its_response(dense: CapturedTraining) -> None:
    (capture_of_rank,) = dense.capture.ranks
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    moved = capture_of_rank.values(
        capture_of_rank.first_records[TensorKey(CaptureStage.WEIGHTS, name, "update")]
    )
    assert (
        0.009 < abs(moved).max() < 0.011
    )  # Adam's first updates are as large as the learning rate.
    assert dense.capture.responses()[CaptureStage.WEIGHTS, name, "update"] > 0


def test_rows_of_an_expert_are_in_the_order_of_megatrons_tokens(
    experts: CapturedTraining,
) -> None:
    (capture_of_rank,) = experts.capture.ranks
    layer = "decoder.layers.0.mlp"
    hidden, chosen = (
        capture_of_rank.values(
            capture_of_rank.first_records[TensorKey(CaptureStage.OUTPUTS, name, slot, 0)]
        )
        for name, slot in ((f"{layer}.router", "input.input"), (f"{layer}.router", "output.1"))
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    for expert in range(4):
        tensor_key = TensorKey(
            CaptureStage.OUTPUTS,
            f"{layer}.experts.local_experts.{expert}",
            "input.hidden_states",
            0,
        )
        assert (
            capture_of_rank.values(capture_of_rank.first_records[tensor_key])
            == rows[chosen[:, expert]]
        ).all()


def test_every_parameter_has_a_unique_megatron_name() -> None:
    names = [name for name, _ in GPT(settings(*EXPERTS)).named_parameters()]
    ours = [megatron_name(name) for name in names]
    assert len(set(ours)) == len(names)
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in ours
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in ours
