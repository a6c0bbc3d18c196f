"""Sharded data parallelism of Megatron on CPU ranks, from the weights that all strategies start from."""

import pytest

from tests.examples.conftest import ITERATIONS, Run, Trainer
from tools.measurements import MemoryCategory, Operation, read_communication, read_memory
from tools.records import Status

WHOLE_BYTES = 4 * 3_423_616
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.fixture(scope="module")
def zero3(train: Trainer) -> Run:
    return train("train-zero3-gpt2-tiny-2cpu")


def test_zero3_prints_baselines_losses(six: dict[str, Run], zero3: Run) -> None:
    assert zero3.status.status is Status.OK
    assert len(zero3.losses) == ITERATIONS
    assert zero3.losses == pytest.approx(six["baseline"].losses, abs=1.1e-5)


def test_zero3_says_that_it_started_from_the_shared_weights(
    six: dict[str, Run], zero3: Run
) -> None:
    assert zero3.record.start_checkpoint == six["baseline"].record.start_checkpoint
    assert "start_weights" in (zero3.folder / "log.txt").read_text()


def test_zero3_gathers_every_layers_weights_for_forward_and_again_for_backward(zero3: Run) -> None:
    # One layer of 49,984 parameters, padded so that both ranks hold as much.
    layer = 4 * 50_176
    gathers = {
        row.phase.value: row.calls
        for row in read_communication(zero3.folder).ranks[0].calls
        if row.operation is Operation.ALL_GATHER and row.payload_bytes == layer
    }
    # Two micro batches a rank, four layers; after the first the update's own gather stands in once.
    assert gathers["backward"] == 8
    assert gathers["forward"] + gathers["optimizer"] == 8


@pytest.mark.slow
def test_each_zero_stage_halves_what_it_shards(
    six: dict[str, Run], zero3: Run, train: Trainer
) -> None:
    stages = [six["dp2"], *(train(f"train-zero{n}-gpt2-tiny-2cpu") for n in (1, 2)), zero3]
    for run in stages:
        assert run.losses == pytest.approx(six["baseline"].losses, abs=1.1e-5)
    for stage, run in enumerate(stages):
        expected = {
            MemoryCategory.WEIGHTS: 1 if stage >= 3 else 2,
            MemoryCategory.GRADIENTS: 1 if stage >= 2 else 2,
            # Adam's two moments; Megatron-FSDP (2 and 3) also keeps a copy of the weights to update.
            MemoryCategory.OPTIMIZER_STATE: (4, 2, 3, 3)[stage],
        }
        ranks = read_memory(run.folder).ranks
        held = {c: sum(rank.categories[c] for rank in ranks) for c in expected}
        for category, copies in expected.items():
            # Padding to equal parts, and Adam's step count of four bytes a tensor, come on top.
            assert 0 <= held[category] - copies * WHOLE_BYTES < 8000, (stage, category)


@pytest.mark.slow
def test_fsdp2_agrees_with_a_baseline_whose_output_layer_is_its_own(train: Trainer) -> None:
    fsdp2 = train("train-fsdp2-gpt2-tiny-2cpu")
    baseline = train("train-baseline-gpt2-tiny-1cpu", extra=(UNTIED,))
    assert fsdp2.record.start_checkpoint == baseline.record.start_checkpoint
    assert len(fsdp2.losses) == ITERATIONS
    assert fsdp2.losses == pytest.approx(baseline.losses, abs=1.1e-5)
