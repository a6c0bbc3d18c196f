"""The native backend compared with Megatron: the same weights, batches and schedule must give the same losses."""

import pytest

from parakit.artifacts.run import Status
from parakit.config.run import Backend, OptimizerName
from parakit.native.model import GPT
from parakit.native.weights import load_initial_weights
from tests.examples.runs import ITERATIONS, Run, Trainer
from tests.native.small_model import settings


def assert_prints_match_megatron(native: Run, megatron: Run) -> None:
    assert native.status.status is Status.OK
    assert len(native.losses) == ITERATIONS
    assert native.losses == pytest.approx(megatron.losses, rel=1e-6)
    assert [line.grad_norm for line in native.log.iterations] == pytest.approx(
        [line.grad_norm for line in megatron.log.iterations], abs=1.1e-3
    )
    # Megatron rounds the learning rate to fp32 before it is printed.
    assert [line.learning_rate for line in native.log.iterations] == pytest.approx(
        [line.learning_rate for line in megatron.log.iterations], rel=2e-7
    )


def test_native_prints_megatrons_losses_and_gradient_norms(baseline: Run, native: Run) -> None:
    assert_prints_match_megatron(native, baseline)


def test_native_run_is_recorded_as_native_with_the_shared_initial_weights(
    baseline: Run, tp2: Run, native: Run
) -> None:
    record = native.record
    assert record.spec.backend == "native"
    assert record.entry.path == "examples/gpt3/pretrain_native.py"
    assert record.start_checkpoint == baseline.record.start_checkpoint
    assert native.parameters == tp2.parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["baseline", "dp2", "fsdp2"])
def test_native_prints_the_same_on_one_rank_and_under_data_parallelism(
    baseline: Run, train: Trainer, name: str
) -> None:
    devices = 1 if name == "baseline" else 2
    run = train(f"train-{name}-gpt2-tiny-{devices}cpu", backend=Backend.NATIVE)
    assert_prints_match_megatron(run, baseline)


@pytest.mark.slow
def test_twenty_iterations_agree_to_1e_5(train: Trainer) -> None:
    megatron = train("train-baseline-gpt2-tiny-1cpu", iterations=20)
    native = train("train-baseline-gpt2-tiny-1cpu", iterations=20, backend=Backend.NATIVE)
    assert len(native.losses) == 20
    assert native.losses == pytest.approx(megatron.losses, rel=1e-5)


def test_a_checkpoint_of_another_model_is_refused_with_both_shapes(baseline: Run) -> None:
    start = baseline.folder.parent / ".start"
    checkpoint = start / str(baseline.record.start_checkpoint)
    with pytest.raises(SystemExit, match=r"is of another model: word_embeddings.weight should be"):
        load_initial_weights(GPT(settings()), checkpoint)


@pytest.mark.slow
def test_muon_of_native_and_megatron_gives_the_same_losses(train: Trainer) -> None:
    options = {"optimizer": OptimizerName.MEGATRON_MUON, "iterations": 20}
    megatron, native = (
        train("train-dp2-gpt2-tiny-2cpu", backend=backend, **options)
        for backend in (Backend.MEGATRON, Backend.NATIVE)
    )
    assert len(megatron.losses) == 20
    assert native.losses == pytest.approx(megatron.losses, rel=1e-5)
