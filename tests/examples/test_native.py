"""Plain PyTorch against Megatron: the same weights, batches and schedule must give the same losses."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.native.batches import SplitSamples
from examples.native.model import GPT, initialise
from examples.native.schedule import learning_rate
from examples.native.settings import Settings, parse_settings, unknown_flags
from examples.native.weights import load_start
from tests.examples.conftest import ITERATIONS, Run, Trainer
from tools.preprocess.split import Part, split_documents
from tools.records.run import Status
from tools.spec.run import Backend

REQUIRED = shlex.split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --vocab-size 100 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 100 --exit-interval 3 --seed 1 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-decay-iters 100 --lr-warmup-fraction .1 --weight-decay .1 --adam-beta1 .9 "
    "--adam-beta2 .95 --clip-grad 1 --data-path data"
)


def settings(*more: str) -> Settings:
    return parse_settings((*REQUIRED, *more))


@pytest.fixture(scope="module")
def native(train: Trainer) -> dict[str, Run]:
    names = ("baseline-gpt2-tiny-1cpu", "tp2-gpt2-tiny-2cpu")
    return {
        name.partition("-")[0]: train(f"train-{name}", backend=Backend.NATIVE) for name in names
    }


@pytest.mark.parametrize("name", ["baseline", "tp2"])
def test_native_prints_megatrons_losses_and_gradient_norms(
    six: dict[str, Run], native: dict[str, Run], name: str
) -> None:
    mine, theirs = native[name], six["baseline"]
    assert mine.status.status is Status.OK
    assert len(mine.losses) == ITERATIONS
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert [line.grad_norm for line in mine.log.iterations] == pytest.approx(
        [line.grad_norm for line in theirs.log.iterations], abs=1.1e-3
    )
    # Megatron's rate has been an fp32 number before it is printed.
    assert [line.learning_rate for line in mine.log.iterations] == pytest.approx(
        [line.learning_rate for line in theirs.log.iterations], rel=2e-7
    )


def test_native_runs_are_recorded_as_such_from_the_same_start(
    six: dict[str, Run], native: dict[str, Run]
) -> None:
    record = native["tp2"].record
    assert record.spec.backend == "native"
    assert record.entry.path == "examples/gpt3/pretrain_native.py"
    assert record.start_checkpoint == six["baseline"].record.start_checkpoint
    assert native["tp2"].parameters == six["tp2"].parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2", "fsdp2"])
def test_native_data_parallelism_prints_megatrons_losses(
    six: dict[str, Run], train: Trainer, name: str
) -> None:
    run = train(f"train-{name}-gpt2-tiny-2cpu", backend=Backend.NATIVE)
    assert run.losses == pytest.approx(six["baseline"].losses, rel=1e-6)


@pytest.mark.slow
def test_twenty_iterations_agree_to_a_hundred_thousandth(train: Trainer) -> None:
    theirs = train("train-baseline-gpt2-tiny-1cpu", iterations=20)
    mine = train("train-baseline-gpt2-tiny-1cpu", iterations=20, backend=Backend.NATIVE)
    assert len(mine.losses) == 20
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)


def test_the_first_update_has_no_learning_rate_and_the_warm_up_is_linear() -> None:
    rates = [learning_rate(settings(), updates) for updates in (0, 5, 10, 55, 100, 101)]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 5.5e-4, 1e-4, 1e-4])


def test_a_flag_that_is_not_implemented_is_named() -> None:
    assert unknown_flags((*REQUIRED, "--qk-layernorm", "--log-throughput")) == ["--qk-layernorm"]
    with pytest.raises(SystemExit, match="--qk-layernorm is not implemented by the native backend"):
        settings("--qk-layernorm")


def test_labels_are_the_tokens_one_place_further(sample_prefix: Path) -> None:
    samples = SplitSamples(sample_prefix, "1,0,0", samples=4, seq_length=64, seed=7)
    first, second = samples.batch(0, 2)
    assert first.shape == second.shape == (2, 64)
    assert torch.equal(first[:, 1:], second[:, :-1])


def test_documents_of_the_training_split_are_the_first_share() -> None:
    assert np.array_equal(split_documents("949,50,1", 1000), np.arange(949))
    assert np.array_equal(split_documents("949,50,1", 1000, Part.TEST), [999])


def test_a_checkpoint_of_another_model_is_refused_with_both_shapes(six: dict[str, Run]) -> None:
    start = six["baseline"].folder.parent / ".start"
    checkpoint = start / str(six["baseline"].record.start_checkpoint)
    with pytest.raises(SystemExit, match=r"is of another model: word_embeddings.weight should be"):
        load_start(GPT(settings()), checkpoint)


def test_fresh_weights_are_scaled_down_where_they_enter_the_residual() -> None:
    model = GPT(settings("--init-method-std", "0.5"))
    initialise(model, settings("--init-method-std", "0.5"))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert float(parameters["blocks.0.mlp.fc1.weight"].std()) == pytest.approx(0.5, rel=0.1)
    assert float(parameters["blocks.0.mlp.fc2.weight"].std()) == pytest.approx(0.25, rel=0.1)
    assert torch.all(parameters["blocks.1.norm1.weight"] == 1)
    assert torch.all(parameters["blocks.1.attention.qkv.bias"] == 0)
