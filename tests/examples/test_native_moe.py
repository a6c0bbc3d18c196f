"""The native mixture of experts compared with Megatron, with the same weights, batches and routing."""

import pytest

from parakit.artifacts.measurements import CommunicationRecord, RoutingRecord, read_measurements
from parakit.artifacts.run import Status
from parakit.config.run import Backend, OptimizerName
from parakit.costs.operations import Operation
from tests.examples.runs import ITERATIONS, Run, Trainer


def test_native_prints_megatrons_losses_and_gradient_norms(
    experts: Run, native_experts: Run
) -> None:
    assert native_experts.status.status is Status.OK
    assert len(native_experts.losses) == ITERATIONS
    assert native_experts.losses == pytest.approx(experts.losses, rel=1e-6)
    for native, megatron in zip(native_experts.log.iterations, experts.log.iterations, strict=True):
        assert native.grad_norm == pytest.approx(megatron.grad_norm, abs=1.1e-3)
        assert native.extra_metrics == pytest.approx(megatron.extra_metrics, rel=1e-5)


def test_native_validates_as_megatron_does_and_adds_the_accuracy(
    experts: Run, native_experts: Run
) -> None:
    (native,), (megatron,) = native_experts.log.validation, experts.log.validation
    assert native.losses["lm loss"] == pytest.approx(megatron.losses["lm loss"], rel=1e-6)
    assert 0 < native.losses["next token accuracy"] < 1


def test_experts_over_two_ranks_are_the_same_model(
    native_experts: Run, spread_experts: Run
) -> None:
    assert spread_experts.losses == pytest.approx(native_experts.losses, rel=1e-6)
    assert spread_experts.log.validation[0].losses == pytest.approx(
        native_experts.log.validation[0].losses
    )
    # Half of the 8 experts in 4 layers, each with two matrices of 64 × 128, are on the other rank.
    (whole,), (half,) = native_experts.parameters.values(), spread_experts.parameters.values()
    assert whole - half == 4 * 4 * 2 * 64 * 128


def test_tokens_travel_by_all_to_all_and_the_ledger_sees_it(spread_experts: Run) -> None:
    record = read_measurements(spread_experts.folder, CommunicationRecord)
    exchanges = [
        call
        for call in record.ranks[0].calls
        if call.operation is Operation.ALL_TO_ALL and call.group == "ep"
    ]
    assert sum(call.calls for call in exchanges) > 0


def test_routing_is_recorded_and_nothing_is_dropped(
    native_experts: Run, spread_experts: Run
) -> None:
    tokens_of_layer = []
    for run in (native_experts, spread_experts):
        rows = [
            row for rank in read_measurements(run.folder, RoutingRecord).ranks for row in rank.layers
            if (row.iteration, row.layer) == (1, 1)
        ]  # fmt: skip
        assert all(row.dropped_tokens == 0 for row in rows)
        tokens_of_layer.append(
            [sum(counts) for counts in zip(*(r.tokens_per_expert for r in rows), strict=True)]
        )
    whole, both = tokens_of_layer
    assert whole == both
    assert sum(whole) == 2 * 8 * 64  # two experts per token for 8 samples of 64 tokens


@pytest.mark.slow
def test_data_parallel_experts_print_the_same_losses(train: Trainer, native_experts: Run) -> None:
    run = train("train-dp2-moe-tiny-2cpu", backend=Backend.NATIVE)
    assert run.losses == pytest.approx(native_experts.losses, rel=1e-6)


@pytest.mark.slow
def test_muon_trains_the_same_on_one_rank_and_with_spread_experts(train: Trainer) -> None:
    options = {"backend": Backend.NATIVE, "optimizer": OptimizerName.MUON}
    alone = train("train-baseline-moe-tiny-1cpu", **options)
    spread = train("train-ep2-moe-tiny-2cpu", **options)
    assert alone.status.status is Status.OK
    assert alone.losses[-1] < alone.losses[0]
    assert spread.losses == pytest.approx(alone.losses, rel=1e-4)  # The update computes in bf16.
