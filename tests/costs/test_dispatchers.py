"""Buffers of DeepEP and HybridEP, whose expected bytes were computed by hand from their sources for tiny shapes."""

from dataclasses import replace

import pytest

from parakit.config.flags import Flags
from parakit.config.model import ModelShape
from parakit.config.run import DeviceKind, RunSpec, TokenDispatcher, parse_token_dispatcher
from parakit.config.strategy import Batch, Parallelism
from parakit.costs.dispatchers import dispatcher_bytes
from parakit.costs.memory import estimate_rank_memory
from parakit.formatting.units import MIB

TINY = ModelShape(2, 256, 8, 8, 32, 64, 4, 4, experts=64, experts_per_token=1, expert_ffn_hidden=8)
SLOT = 2 * 256 + 8 + 128 * 8 + 128 * 4 + 128 * 4
"""Hidden state, origin, ids, probabilities and scales."""


def run(ranks: int, dispatcher: TokenDispatcher, shape: ModelShape = TINY) -> RunSpec:
    split, batch = Parallelism(data=ranks, expert=ranks), Batch(1, ranks)
    return RunSpec(shape, split, batch, token_dispatcher=dispatcher)


@pytest.mark.parametrize(
    ("ranks", "held"),
    [
        (2, 10 * 2 * (256 * SLOT + 20)),
        (8, 10 * 8 * (256 * SLOT + 20)),
        (64, 10 * 8 * (288 * SLOT + 76) + 20 * 8 * (140 * (SLOT + 16) + 72)),
        (12, -32 * MIB),  # DeepEP does not support this number of ranks.
        (1, -32 * MIB),
    ],
)
def test_deepep_buffer_has_the_size_of_its_hints(ranks: int, held: int) -> None:
    buffer_bytes = dispatcher_bytes(run(ranks, TokenDispatcher.DEEP_EP))
    assert buffer_bytes == pytest.approx(32 * MIB + held, abs=127)
    assert buffer_bytes % 128 == 0


def test_hybridep_buffer_holds_the_tokens_of_all_ranks() -> None:
    spec = run(4, TokenDispatcher.HYBRID_EP)
    assert dispatcher_bytes(spec) == 4 * 4 * (2 * 256 + 64 * 4 + 2 * 4)
    narrow = replace(TINY, latent_experts=128)
    assert dispatcher_bytes(replace(spec, shape=narrow)) == 4 * 4 * (2 * 128 + 64 * 4 + 4)


def test_no_buffer_is_held_with_nccl_dispatch_or_without_experts() -> None:
    assert dispatcher_bytes(run(4, TokenDispatcher.ALL_TO_ALL)) == 0
    assert dispatcher_bytes(run(4, TokenDispatcher.HYBRID_EP, TINY.without_experts)) == 0


def test_dispatcher_buffer_counts_for_device_memory_but_not_for_live_tensors() -> None:
    plain, flex = (
        estimate_rank_memory(run(8, dispatcher))
        for dispatcher in (TokenDispatcher.ALL_TO_ALL, TokenDispatcher.DEEP_EP)
    )
    assert flex.live == plain.live
    held = dispatcher_bytes(run(8, TokenDispatcher.DEEP_EP))
    assert flex.needed - plain.needed == flex.total - plain.total == held
    on_cpu = replace(run(8, TokenDispatcher.DEEP_EP), device=DeviceKind.CPU)
    assert estimate_rank_memory(on_cpu).allocator == 900 * MIB


def test_flex_dispatcher_is_that_of_its_backend() -> None:
    flex = ["--moe-token-dispatcher-type", "flex"]
    assert parse_token_dispatcher(Flags(flex)) is TokenDispatcher.DEEP_EP
    hybrid = [*flex, "--moe-flex-dispatcher-backend", "hybridep"]
    assert parse_token_dispatcher(Flags(hybrid)) is TokenDispatcher.HYBRID_EP
    assert parse_token_dispatcher(Flags(hybrid[2:])) is TokenDispatcher.ALL_GATHER
