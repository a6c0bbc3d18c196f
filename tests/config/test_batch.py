"""The batch of a run: published runs train the published one, all others that of the model's file."""

from dataclasses import replace

import pytest

from parakit.config.batch import (
    choose_batch,
    choose_samples,
    describe_batch_choice,
    fit_micro_batch,
)
from parakit.config.model import load_model
from parakit.config.run import DeviceKind
from parakit.config.strategy import Batch, Parallelism, parse_strategy

TINY = load_model("gpt2-tiny")
LARGE = load_model("gpt2-large")


@pytest.mark.parametrize(
    ("strategy", "batch"),
    [
        ("dp2", Batch(32, 64)),
        ("tp2", Batch(64, 64)),
        ("sp2", Batch(64, 64)),
        ("cp2", Batch(64, 64)),
        ("pp2", Batch(64, 64)),
    ],
)
def test_published_runs_train_their_published_batch(strategy: str, batch: Batch) -> None:
    assert choose_batch(LARGE, parse_strategy(strategy, 2), DeviceKind.GPU) == batch


def test_the_same_strategy_on_cpu_ranks_is_not_published() -> None:
    assert choose_batch(LARGE, parse_strategy("tp2", 2), DeviceKind.CPU) == Batch(32, 32)


@pytest.mark.parametrize(
    ("strategy", "devices", "batch"),
    [
        ("baseline", 1, Batch(4, 4)),
        ("dp2", 2, Batch(2, 4)),
        ("tp2", 2, Batch(4, 4)),
        ("pp2", 2, Batch(4, 4)),
        # Interleaved stages need two micro batches.
        ("vpp2", 2, Batch(2, 4)),
        ("pipedream2bw", 2, Batch(2, 4)),
        ("dp4", 4, Batch(1, 4)),
        ("tp2dp2", 4, Batch(2, 4)),
    ],
)
def test_every_strategy_trains_the_samples_of_the_models_file(
    strategy: str, devices: int, batch: Batch
) -> None:
    assert choose_batch(TINY, parse_strategy(strategy, devices), DeviceKind.CPU) == batch


@pytest.mark.parametrize("strategy", ["dp8", "tp8", "vpp2dp4", "tp2pp2dp2"])
def test_eight_ranks_train_eight_samples_of_a_file_that_states_four(strategy: str) -> None:
    parallelism = parse_strategy(strategy, 8)
    batch = choose_batch(TINY, parallelism, DeviceKind.CPU)
    assert batch.global_batch_size == 8
    assert describe_batch_choice(TINY, batch, parallelism, DeviceKind.CPU) == (
        "The global batch is 8: the model file's 4, rounded up to a multiple of 8 ranks; GLOBAL_BATCH= sets "
        "another."
    )


def test_the_users_own_file_states_the_samples_that_are_trained() -> None:
    users_model = replace(TINY, source="mine.args")
    assert choose_samples(users_model, 8) == 4
    assert choose_samples(TINY, 8) == 8


def test_a_stated_global_batch_gets_the_largest_micro_batch_that_fits_it() -> None:
    parallelism = Parallelism(data=2)
    assert choose_batch(TINY, parallelism, DeviceKind.CPU, global_batch_size=8) == Batch(4, 8)
    assert choose_batch(TINY, parallelism, DeviceKind.CPU, global_batch_size=12) == Batch(2, 12)


def test_a_stated_micro_batch_gets_a_global_batch_that_it_divides() -> None:
    parallelism = Parallelism(data=2)
    assert choose_batch(TINY, parallelism, DeviceKind.CPU, micro_batch_size=1) == Batch(1, 4)
    assert choose_batch(TINY, parallelism, DeviceKind.CPU, micro_batch_size=4) == Batch(4, 8)


def test_only_a_published_or_enlarged_batch_gets_a_sentence() -> None:
    tp2 = parse_strategy("tp2", 2)
    assert describe_batch_choice(TINY, Batch(4, 4), tp2, DeviceKind.CPU) == ""
    assert describe_batch_choice(LARGE, Batch(4, 8), tp2, DeviceKind.GPU) == ""
    assert describe_batch_choice(LARGE, Batch(64, 64), tp2, DeviceKind.GPU) == (
        "Batch 64/64 (micro/global) is that of the published run; MICRO_BATCH= and GLOBAL_BATCH= set others."
    )


def test_a_micro_batch_that_fits_no_replica_becomes_one() -> None:
    assert fit_micro_batch(Batch(4, 8), Parallelism(data=3)) == 1
    assert fit_micro_batch(Batch(4, 12), Parallelism(data=2)) == 2
