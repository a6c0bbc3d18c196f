"""All collective calls of one rank in one training iteration, from closed forms.

Each call names its upstream function. Groups of one rank are left out, because their calls move
nothing. Barriers and calls outside a training iteration (evaluation, checkpoints, start-up) are not
included.
"""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.run import RunSpec
from parakit.costs.collectives.call import (
    LATEST_MEGATRON,
    CollectiveCall,
    MegatronVersion,
    total_wire_bytes,
)
from parakit.costs.collectives.context import context_collectives, mtp_boundary_collectives
from parakit.costs.collectives.control import control_collectives
from parakit.costs.collectives.data import gradient_collectives
from parakit.costs.collectives.experts import expert_collectives
from parakit.costs.collectives.pipeline import pipeline_collectives
from parakit.costs.collectives.tensor import tensor_collectives


def rank_collectives(
    spec: RunSpec, pipeline_rank: int = 0, megatron: MegatronVersion = LATEST_MEGATRON
) -> tuple[CollectiveCall, ...]:
    """Return the calls of one pipeline rank in a steady iteration.

    All TP, CP and DP ranks of this pipeline rank make identical calls. Calls in groups of one rank and calls
    without bytes are left out.

    Raises:
        UnevenSplitError: A parallel size does not divide the dimension that it splits.
    """
    calls = _all_collectives(spec, pipeline_rank, megatron)
    return tuple(call for call in calls if call.ranks > 1 and call.total_payload_bytes)


def busiest_collectives(spec: RunSpec) -> tuple[CollectiveCall, ...]:
    """Return the calls of the pipeline rank that sends most of the first, second and last ranks."""
    pipeline = spec.parallelism.pipeline
    ranks = sorted({0, min(1, pipeline - 1), pipeline - 1})
    return max((rank_collectives(spec, rank) for rank in ranks), key=total_wire_bytes)


def _all_collectives(
    spec: RunSpec, pipeline_rank: int, megatron: MegatronVersion
) -> Iterator[CollectiveCall]:
    """Yield the calls of one pipeline rank per iteration. Calls in groups of one rank are included."""
    yield from tensor_collectives(spec, pipeline_rank, megatron)
    for run in spec.uniform_stage_specs(pipeline_rank):
        yield from context_collectives(run)
        yield from expert_collectives(run)
    if pipeline_rank == spec.parallelism.pipeline - 1:
        yield from mtp_boundary_collectives(spec)
    yield from pipeline_collectives(spec, pipeline_rank)
    yield from gradient_collectives(spec, pipeline_rank)
    yield from control_collectives(spec, pipeline_rank, megatron)
