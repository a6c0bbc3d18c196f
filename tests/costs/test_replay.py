"""The replay of a rank's allocations agrees with the closed forms on live bytes, and adds the allocator's gaps."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from parakit.config.model import load_model
from parakit.config.peft import Lora
from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, RunSpec, spec_from_model
from parakit.config.strategy import Batch, Parallelism, Sharding, count_devices, parse_strategy
from parakit.costs.memory import DEVICE_BASE_BYTES, estimate_rank_memory, find_peak_rank
from parakit.costs.replay import (
    find_peak_device_memory,
    find_peak_rank_that_may_fit,
    replay_rank,
    supports_replay,
)
from parakit.formatting.units import GIB, MIB
from parakit.planner.candidates import (
    build_unsharded_spec,
    enumerate_splits,
    enumerate_variants,
    list_micro_batch_sizes,
)

H100_BYTES = 81559 * MIB
MODELS = ("gpt2-tiny", "gpt2-large", "gpt2-xl", "gpt3-1.3b", "gpt3-13b", "llama3-8b")


def run(
    model: str, strategy: str, micro_batch: int, micro_batches: int = 1, **changes: object
) -> RunSpec:
    split = parse_strategy(strategy, count_devices(strategy))
    batch = Batch(micro_batch, micro_batch * micro_batches * split.data)
    spec = spec_from_model(load_model(model), split, batch)
    spec = replace(spec, dtype="bf16", device=DeviceKind.GPU, fused_attention=True)
    return replace(spec, fused_norms=True, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "strategy", "micro_batch", "micro_batches"),
    [
        ("gpt2-xl", "baseline", 15, 1),
        ("gpt2-xl", "dp4-zero1", 16, 1),
        ("gpt2-xl", "dp8-zero1", 21, 2),
        ("gpt2-4.2b", "tp4", 20, 1),
        ("gpt2-8.3b", "sp8", 32, 1),
        ("gpt2-8.3b", "pp8", 4, 8),
        ("gpt2-8.3b", "sp2pp4", 8, 4),
        ("gpt2-8.3b", "sp2vpp4x3", 8, 4),
        ("gpt2-1.2b", "cp4", 8, 1),
        ("llama3-8b", "sp8", 1, 2),
        ("llama3-8b", "sp4pp2", 1, 4),
    ],
)
def test_live_bytes_of_the_replay_are_those_of_the_closed_form(
    model: str, strategy: str, micro_batch: int, micro_batches: int
) -> None:
    spec = run(model, strategy, micro_batch, micro_batches)
    assert supports_replay(spec)
    for rank in {0, spec.parallelism.pipeline - 1}:
        live = estimate_rank_memory(spec, rank).live
        assert replay_rank(spec, rank).peak_live == pytest.approx(live, rel=0.015)


@pytest.mark.parametrize(("micro_batch", "copies_matter"), [(15, False), (1, True)])
def test_fp32_copies_of_gradients_raise_the_peak_only_of_runs_with_few_activations(
    micro_batch: int, copies_matter: bool
) -> None:
    spec = run("gpt2-xl", "baseline", micro_batch, dtype="fp16")
    live = estimate_rank_memory(spec).live
    assert (replay_rank(spec).peak_live > 1.015 * live) == copies_matter


def test_context_parallelism_by_all_to_all_stores_the_output_of_attention_twice() -> None:
    ring, all_to_all = (run("gpt2-1.2b", "cp8", 8, cp_comm_type=kind) for kind in ("p2p", "a2a"))
    layers, tokens_per_rank, hidden = 40, 8 * 1024 // 8, 1536
    more = replay_rank(all_to_all).peak_live - replay_rank(ring).peak_live
    assert more == layers * tokens_per_rank * hidden * 2


def draw_layout(random: Random) -> RunSpec | None:
    """Return a random run of one of `MODELS` on up to 32 GPUs, or None if the replay does not know it."""
    model = load_model(random.choice(MODELS))
    devices = random.choice((1, 2, 4, 8, 16, 24, 32))
    samples = devices * random.choice((1, 2, 3, 4, 8))
    template = replace(
        spec_from_model(model, Parallelism(), Batch(1, samples)),
        device=DeviceKind.GPU,
        dtype=random.choice(("bf16", "fp16")),
        dropout=random.choice((0.0, 0.1)),
    )
    split = random.choice(list(enumerate_splits(template.shape, devices)))
    sizes = list_micro_batch_sizes(split, samples, largest=8)
    if not sizes:
        return None
    plain = build_unsharded_spec(template, split, random.choice(sizes), Recompute.NONE)
    spec = random.choice(list(enumerate_variants(plain)))
    return spec if supports_replay(spec) else None


@settings(
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    deadline=None,
    max_examples=60,
)
@given(st.integers(min_value=0, max_value=2**32), st.floats(min_value=0.8, max_value=1.2))
def test_no_run_that_fits_by_the_replay_is_dropped_by_the_closed_form(
    seed: int, device_ratio: float
) -> None:
    spec = draw_layout(Random(seed))
    assume(spec is not None)
    assert spec is not None
    device_bytes = device_ratio * find_peak_rank(spec)[1].total
    _, memory = find_peak_device_memory(spec, device_bytes)
    assert find_peak_rank_that_may_fit(spec, memory.total) is not None


def test_empty_blocks_of_the_closed_form_may_hold_tensors_in_the_replay() -> None:
    spec = run("gpt2-large", "dp2", 16, dtype="fp16")
    closed = find_peak_rank(spec)[1]
    replayed = find_peak_device_memory(spec)[1].total
    assert closed.needed < replayed < closed.total
    assert find_peak_rank_that_may_fit(spec, replayed) is not None
    assert find_peak_rank_that_may_fit(spec, closed.needed - 1) is None


def test_a_replay_of_more_micro_batches_than_the_schedule_repeats_has_the_same_memory() -> None:
    few, many = (run("gpt2-8.3b", "sp2vpp4x3", 8, number) for number in (12, 400))
    assert replay_rank(few) == replay_rank(many)


def test_fifteen_samples_of_gpt2_xl_fit_an_h100_and_sixteen_run_out_of_memory() -> None:
    limit = H100_BYTES - DEVICE_BASE_BYTES
    fifteen, sixteen = (
        replay_rank(run("gpt2-xl", "baseline", size), 0, limit) for size in (15, 16)
    )
    assert not fifteen.is_out_of_memory
    assert sixteen.is_out_of_memory
    assert fifteen.reserved < limit < sixteen.reserved


def test_the_closed_form_misses_the_gaps_that_make_sixteen_samples_run_out_of_memory() -> None:
    spec = run("gpt2-xl", "baseline", 16)
    assert find_peak_rank(spec)[1].total < H100_BYTES < find_peak_device_memory(spec)[1].total


def test_a_run_out_of_memory_exceeds_the_device_and_one_within_does_not() -> None:
    for size, exceeds in ((15, False), (16, True)):
        _, memory = find_peak_device_memory(run("gpt2-xl", "baseline", size), H100_BYTES)
        assert (memory.needed > H100_BYTES) == exceeds


def test_a_full_device_gets_empty_segments_back() -> None:
    spec = run("gpt2-xl", "dp8-zero1", 16)
    free, limited = replay_rank(spec), replay_rank(spec, limit=replay_rank(spec).reserved - GIB)
    assert not limited.is_out_of_memory
    assert limited.reserved < free.reserved
    assert limited.peak_live == free.peak_live


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": Recompute.FULL},
        {"dtype": "fp32"},
        {"device": DeviceKind.CPU},
        {"fused_norms": False},
        {"fused_attention": False},
        {"fused_loss": True},
        {"lora": Lora()},
        {"parallelism": Parallelism(data=8, sharding=Sharding.ZERO3)},
    ],
    ids=str,
)
def test_other_runs_have_the_memory_of_the_closed_form(changes: dict[str, object]) -> None:
    spec = replace(run("gpt2-xl", "dp8", 4), **changes)  # type: ignore[arg-type]
    assert not supports_replay(spec)
    assert find_peak_device_memory(spec, H100_BYTES) == find_peak_rank(spec)


def test_mixtures_have_the_memory_of_the_closed_form() -> None:
    spec = run("olmoe-like-64e", "dp8-zero1", 4)
    assert not supports_replay(spec)
    assert find_peak_device_memory(spec) == find_peak_rank(spec)
