"""Every call that one rank makes in one training iteration, from closed forms.

Read from Megatron-LM f4fa7d6b and core_v0.19.0; each entry names its upstream function. Groups of
one rank are left out: Megatron calls them, nothing moves. Barriers and calls outside a training
iteration (evaluation, checkpoints, start-up) are not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tools.plan.megatron import LATEST, Megatron
from tools.plan.traffic_bookkeeping import bookkeeping_traffic
from tools.plan.traffic_context import context_traffic
from tools.plan.traffic_data import gradient_traffic
from tools.plan.traffic_experts import expert_traffic
from tools.plan.traffic_pipeline import pipeline_traffic
from tools.plan.traffic_tensor import tensor_traffic
from tools.plan.wire import Traffic
from tools.spec.run import RunSpec


def communication_of_rank(
    configuration: RunSpec, pipeline_rank: int = 0, megatron: Megatron = LATEST
) -> tuple[Traffic, ...]:
    """Calls of one pipeline rank in a steady iteration; its TP, CP and DP ranks are alike.

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
    """
    calls = _all_traffic(configuration, pipeline_rank, megatron)
    return tuple(
        replace(item, transport=configuration.transport)
        for item in calls
        if item.ranks > 1 and item.calls and item.payload_bytes
    )


def _all_traffic(
    configuration: RunSpec, pipeline_rank: int, megatron: Megatron
) -> Iterator[Traffic]:
    yield from tensor_traffic(configuration, pipeline_rank, megatron)
    yield from context_traffic(configuration)
    yield from expert_traffic(configuration)
    yield from pipeline_traffic(configuration, pipeline_rank)
    yield from gradient_traffic(configuration, pipeline_rank)
    yield from bookkeeping_traffic(configuration, pipeline_rank, megatron)
