"""Calls over the data-parallel ranks: gradients, and the weights or shards that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from tools.plan.collectives.call import CollectiveCall
from tools.plan.memory import PRECISIONS
from tools.plan.tensors import Buffer, chunk_buffers, layer_parameters, rank_parameters
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group
from tools.spec.model import ModelShape
from tools.spec.run import RunSpec
from tools.spec.strategy import Sharding

_BUCKETS = "distributed/param_and_grad_buffer.py: _ParamAndGradBucketGroup"
_FSDP = "distributed/fsdp/src/megatron_fsdp; torch.distributed.fsdp.fully_shard"
_BUCKET_ALIGNMENT = 128


def gradient_collectives(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Gradient and weight calls of one pipeline rank in one iteration."""
    sharding = spec.parallelism.sharding
    if sharding is Sharding.NONE:
        yield from _all_reduced(spec, pipeline_rank)
    elif sharding is Sharding.ZERO1:
        yield from _distributed_optimizer(spec, pipeline_rank)
    else:
        yield from _fully_sharded(spec, pipeline_rank)


def data_parallel_ranks(spec: RunSpec) -> tuple[int, int]:
    """Ranks that share the gradients of ordinary weights, and of experts."""
    parallelism = spec.parallelism
    ranks = parallelism.data * parallelism.context
    return ranks, parallelism.copies_of_experts


def _all_reduced(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """DDP: one all-reduce of each model chunk's whole buffer (buckets only split it in overlap)."""
    gradient = PRECISIONS[spec.dtype].gradients
    ranks, expert_ranks = data_parallel_ranks(spec)
    for chunk in chunk_buffers(spec, pipeline_rank):
        for group, size, buffer, what in (
            (Group.DATA_CONTEXT, ranks, chunk.untied + chunk.tied, "gradients"),
            (Group.EXPERT_DATA, expert_ranks, chunk.experts, "gradients of experts"),
        ):
            yield CollectiveCall(
                group,
                size,
                Operation.ALL_REDUCE,
                Phase.GRADIENT_SYNC,
                what,
                1,
                gradient * buffer.elements,
                f"{_BUCKETS}.start_grad_sync",
            )


def _distributed_optimizer(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Reduce-scatter of gradients, all-gather of updated weights, over padded buckets.

    A tied embedding on several stages has a bucket of its own; only in a rank's first virtual stage
    is it also a call of its own (`partition_buckets(force_single_bucket_group=…)`). Every tensor
    starts at a multiple of 64 elements and every bucket ends at one of lcm(ranks, 128).

    With expert parallelism two optimizers are chained and each gathers the weights of both
    (`start_param_sync_for_bucket_group_subset`, also `start_param_sync` at f4fa7d6b).
    """
    precision, gathers = PRECISIONS[spec.dtype], _chained_optimizers(spec)
    for group, size, elements in _bucket_groups(spec, pipeline_rank):
        for operation, phase, what, calls, width, function in (
            (
                Operation.REDUCE_SCATTER,
                Phase.GRADIENT_SYNC,
                "gradients",
                1,
                precision.gradients,
                "start_grad_sync",
            ),
            (
                Operation.ALL_GATHER,
                Phase.OPTIMIZER,
                "updated weights",
                gathers,
                precision.weights,
                "start_param_sync",
            ),
        ):
            source = f"{_BUCKETS}.{function}"
            yield CollectiveCall(
                group, size, operation, phase, what, calls, width * elements, source
            )


def _chained_optimizers(spec: RunSpec) -> int:
    return 2 if spec.parallelism.expert > 1 else 1


def _bucket_groups(spec: RunSpec, pipeline_rank: int) -> Iterator[tuple[Group, int, int]]:
    """Buckets that one call moves: their group, its ranks, their elements."""
    ranks, expert_ranks = data_parallel_ranks(spec)
    for stage, chunk in enumerate(chunk_buffers(spec, pipeline_rank)):
        shared = [bucket_elements(buffer, ranks) for buffer in (chunk.untied, chunk.tied)]
        for elements in shared if stage == 0 else [sum(shared)]:
            yield Group.DATA_CONTEXT, ranks, elements
        yield Group.EXPERT_DATA, expert_ranks, bucket_elements(chunk.experts, expert_ranks)


def bucket_elements(buffer: Buffer, ranks: int) -> int:
    """Elements of a distributed optimizer's bucket, with its padding."""
    return _padded(buffer.aligned_elements, lcm(ranks, _BUCKET_ALIGNMENT))


def _fully_sharded(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """ZeRO-2, ZeRO-3 and FSDP2; Megatron-FSDP's buckets of dense models with their padding.

    Every micro batch reduce-scatters its gradients. ZeRO-3 and FSDP2 gather each layer before its
    forward and before its backward; FSDP2 the embedding and the output layer likewise. What ZeRO-3
    has in no layer, and everything under ZeRO-2, which has one bucket, is gathered once, after the
    update.
    """
    shape, parallelism = spec.trained_shape, spec.parallelism
    layers, passes = spec.layers_a_stage, spec.microbatches
    rank = rank_parameters(spec, pipeline_rank)
    split = (parallelism.tensor, parallelism.expert, parallelism.expert_tensor)
    layer = layer_parameters(shape, 1, *split)
    ranks, expert_ranks = data_parallel_ranks(spec)
    experts = layer.experts if parallelism.expert > 1 else 0
    shared = layer.total - experts
    outside = rank.total - layers * layer.total
    if parallelism.sharding is not Sharding.FSDP2 and not shape.experts:
        rows = _widest_row(shape, parallelism.tensor)
        if parallelism.sharding is Sharding.ZERO2:
            layers, outside = 0, _padded(rank.total, ranks * rows)
        shared, outside = _padded(shared, ranks * rows), _padded(outside, ranks * shape.hidden)
    yield from _unit(spec, Group.DATA_CONTEXT, ranks, shared, layers * passes)
    yield from _unit(spec, Group.EXPERT_DATA, expert_ranks, experts, layers * passes)
    if parallelism.sharding is Sharding.FSDP2:
        embedding = rank.word_embedding + rank.position_embedding
        for unit in (embedding, outside - embedding):
            yield from _unit(spec, Group.DATA_CONTEXT, ranks, unit, passes)
    else:
        yield from _unit(spec, Group.DATA_CONTEXT, ranks, outside, passes, layered=False)


def _widest_row(shape: ModelShape, tensor: int) -> int:
    """Megatron-FSDP cuts a bucket where a row of each of its matrices ends (`chunk_size_factor`)."""
    return lcm(shape.hidden, shape.heads * shape.head_width // tensor, shape.ffn_hidden // tensor)


def _padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def _unit(
    spec: RunSpec,
    group: Group,
    ranks: int,
    elements: int,
    passes: int,
    *,
    layered: bool = True,
) -> Iterator[CollectiveCall]:
    """Weights in and gradients out of one unit, `passes` times in an iteration."""
    precision = PRECISIONS[spec.dtype]
    keeps = spec.parallelism.sharding is Sharding.ZERO2 or not layered
    gathers = passes // spec.microbatches if keeps else 2 * passes
    phase = Phase.OPTIMIZER if keeps else Phase.FORWARD
    weights, gradients = precision.weights * elements, precision.gradients * elements
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    yield CollectiveCall(group, ranks, gather, phase, "weights", gathers, weights, _FSDP)
    yield CollectiveCall(
        group, ranks, scatter, Phase.BACKWARD, "gradients", passes, gradients, _FSDP
    )
