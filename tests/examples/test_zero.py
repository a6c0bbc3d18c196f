"""Sharded data parallelism of Megatron on CPU ranks, from the shared initial weights."""

import pytest

from parakit.artifacts.measurements import (
    CommunicationRecord,
    MemoryCategory,
    MemoryRecord,
    read_measurements,
)
from parakit.artifacts.run import Status
from parakit.costs.operations import Operation
from tests.examples.runs import ITERATIONS, Run, Trainer
from tests.examples.test_ledgers import measured, predicted

WHOLE_BYTES = 4 * 277_888
UNTIED = "--untie-embeddings-and-output-weights"


def test_zero3_prints_baselines_losses(baseline: Run, zero3: Run) -> None:
    assert zero3.status.status is Status.OK
    assert len(zero3.losses) == ITERATIONS
    assert zero3.losses == pytest.approx(baseline.losses, abs=1.1e-5)


def test_zero3_reports_that_it_started_from_the_shared_weights(baseline: Run, zero3: Run) -> None:
    assert zero3.record.start_checkpoint == baseline.record.start_checkpoint
    assert "start_weights" in (zero3.folder / "log.txt").read_text()


def test_zero3_gathers_every_layers_weights_for_forward_and_again_for_backward(zero3: Run) -> None:
    # A layer has 49,984 parameters, padded so that both ranks hold equally many.
    layer = 4 * 50_176
    gathers = {
        row.phase.value: row.calls
        for row in read_measurements(zero3.folder, CommunicationRecord).ranks[0].calls
        if row.operation is Operation.ALL_GATHER and row.payload_bytes == layer
    }
    # There are two micro batches per rank and four layers. After the first update its gather replaces another one.
    assert gathers["backward"] == 8
    assert gathers["forward"] + gathers["optimizer"] == 8


def assert_calls_are_in_the_closed_form(run: Run) -> None:
    for rank in read_measurements(run.folder, CommunicationRecord).ranks:
        assert measured(rank) == predicted(run, rank.rank)


def test_every_call_of_zero3_is_in_the_closed_form(zero3: Run) -> None:
    assert_calls_are_in_the_closed_form(zero3)


PADDING = {2: 4 * 128, 3: 4 * 768}
"""Bytes by which Megatron-FSDP pads buckets so that both ranks hold equally many, per stage."""
STEPS = {0: 2 * 52}
"""torch's Adam counts its steps for each of 52 tensors; under the distributed optimizer and FSDP the
count is no tensor (megatron_patches/no_te/adam_step.py)."""


def held(run: Run, category: MemoryCategory) -> list[int]:
    return [rank.categories[category] for rank in read_measurements(run.folder, MemoryRecord).ranks]


def assert_sharded_as_stage_says(run: Run, stage: int) -> None:
    """Assert that each of two ranks holds exactly half of what the stage shards, and all other memory in full."""
    whole = WHOLE_BYTES + PADDING.get(stage, 0)
    assert held(run, MemoryCategory.WEIGHTS) == [whole // 2 if stage >= 3 else whole] * 2
    assert held(run, MemoryCategory.GRADIENTS) == [whole // 2 if stage >= 2 else whole] * 2
    moments = 2 * WHOLE_BYTES * (1 if stage >= 1 else 2)
    # Megatron-FSDP also holds a copy of the weights that its optimizer updates.
    copy = whole if stage >= 2 else 0
    assert sum(held(run, MemoryCategory.OPTIMIZER_STATE)) == moments + copy + 4 * STEPS.get(
        stage, 0
    )


def test_each_zero_stage_halves_the_memory_that_it_shards_exactly(
    dp2: Run, zero1: Run, zero3: Run
) -> None:
    for stage, run in ((0, dp2), (1, zero1), (3, zero3)):
        assert_sharded_as_stage_says(run, stage)


@pytest.mark.slow
def test_zero2_halves_gradients_exactly_and_prints_the_losses_of_baseline(
    baseline: Run, train: Trainer
) -> None:
    zero2 = train("train-zero2-gpt2-tiny-2cpu")
    assert zero2.losses == pytest.approx(baseline.losses, abs=1.1e-5)
    assert_sharded_as_stage_says(zero2, 2)
    assert_calls_are_in_the_closed_form(zero2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2-gpt2-tiny-2cpu", "tp2dp2-fsdp2-gpt2-tiny-4cpu"])
def test_fsdp2_agrees_with_a_baseline_with_an_untied_output_layer(
    train: Trainer, name: str
) -> None:
    fsdp2 = train(f"train-{name}", micro_batch_size=1)
    baseline = train("train-baseline-gpt2-tiny-1cpu", extra=(UNTIED,))
    assert fsdp2.record.start_checkpoint == baseline.record.start_checkpoint
    assert_calls_are_in_the_closed_form(fsdp2)
    assert len(fsdp2.losses) == ITERATIONS
    assert fsdp2.losses == pytest.approx(baseline.losses, abs=1.1e-5)
