"""Plain PyTorch against Megatron: the same weights, batches and schedule must give the same losses."""

import pytest

from parakit.artifacts.run import Status
from parakit.config.run import Backend, OptimizerName
from parakit.native.model import GPT
from parakit.native.weights import load_initial_weights
from tests.examples.runs import ITERATIONS, Run, Trainer
from tests.native.small_model import settings


def assert_prints_what_megatron_does(mine: Run, theirs: Run) -> None:
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


def test_native_prints_megatrons_losses_and_gradient_norms(baseline: Run, native: Run) -> None:
    assert_prints_what_megatron_does(native, baseline)


def test_native_runs_are_recorded_as_such_from_the_same_start(
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
    assert_prints_what_megatron_does(run, baseline)


@pytest.mark.slow
def test_twenty_iterations_agree_to_a_hundred_thousandth(train: Trainer) -> None:
    theirs = train("train-baseline-gpt2-tiny-1cpu", iterations=20)
    mine = train("train-baseline-gpt2-tiny-1cpu", iterations=20, backend=Backend.NATIVE)
    assert len(mine.losses) == 20
    assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)


def test_a_checkpoint_of_another_model_is_refused_with_both_shapes(baseline: Run) -> None:
    start = baseline.folder.parent / ".start"
    checkpoint = start / str(baseline.record.start_checkpoint)
    with pytest.raises(SystemExit, match=r"is of another model: word_embeddings.weight should be"):
        load_initial_weights(GPT(settings()), checkpoint)


@pytest.mark.slow
def test_megatrons_muon_is_the_same_rule_on_both_sides(train: Trainer) -> None:
    options = {"optimizer": OptimizerName.MEGATRON_MUON, "iterations": 20}
    one, other = (
        train("train-dp2-gpt2-tiny-2cpu", backend=backend, **options)
        for backend in (Backend.MEGATRON, Backend.NATIVE)
    )
    assert len(one.losses) == 20
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
