"""Calls over the data-parallel ranks: gradients, and the weights or shards that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from parakit.config.groups import Group, group_size
from parakit.config.model import round_up
from parakit.config.run import RunSpec
from parakit.costs.collectives.call import CollectiveCall, collective
from parakit.costs.memory import bytes_per_parameter
from parakit.costs.operations import Operation, Phase
from parakit.costs.tensors import Buffer, chunk_buffers, layer_parameters, rank_parameters

_BUCKETS = "distributed/param_and_grad_buffer.py: _ParamAndGradBucketGroup"
_FSDP = "distributed/fsdp/src/megatron_fsdp; torch.distributed.fsdp.fully_shard"
_BUCKET_ALIGNMENT = 128

_REDUCE, _SCATTER = Operation.ALL_REDUCE, Operation.REDUCE_SCATTER
_GATHER, _SYNC = Operation.ALL_GATHER, Phase.GRADIENT_SYNC


def gradient_collectives(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Gradient and weight calls of one pipeline rank in one iteration."""
    sharding = spec.parallelism.sharding
    if sharding.wraps_modules:
        yield from _fully_sharded(spec, pipeline_rank)
    elif sharding:
        yield from _distributed_optimizer(spec, pipeline_rank)
    else:
        yield from _all_reduced(spec, pipeline_rank)


def _all_reduced(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """DDP: one all-reduce of each model chunk's whole buffer (buckets only split it in overlap)."""
    width, source = bytes_per_parameter(spec).gradients, f"{_BUCKETS}.start_grad_sync"
    for chunk in chunk_buffers(spec, pipeline_rank):
        for group, what, buffer in (
            (Group.DATA_CONTEXT, "gradients", chunk.untied + chunk.tied),
            (Group.EXPERT_DATA, "gradients of experts", chunk.experts),
        ):
            payload = width * buffer.elements
            yield collective(spec, group, _REDUCE, _SYNC, what, 1, payload, source)


def _distributed_optimizer(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Reduce-scatter of gradients, all-gather of updated weights, over padded buckets.

    A tied embedding on several stages has a bucket of its own; only in a rank's first virtual stage
    is it also a call of its own (`partition_buckets(force_single_bucket_group=…)`). Every tensor
    starts at a multiple of 64 elements and every bucket ends at one of lcm(ranks, 128).

    With expert parallelism two optimizers are chained and each gathers the weights of both
    (`start_param_sync_for_bucket_group_subset`, also `start_param_sync` at f4fa7d6b).
    """
    precision, gathers = bytes_per_parameter(spec), 2 if spec.parallelism.expert > 1 else 1
    start_grad_sync, start_param_sync = (
        f"{_BUCKETS}.start_grad_sync",
        f"{_BUCKETS}.start_param_sync",
    )
    for group, elements in _bucket_groups(spec, pipeline_rank):
        gradients, weights = precision.gradients * elements, precision.weights * elements
        yield collective(spec, group, _SCATTER, _SYNC, "gradients", 1, gradients, start_grad_sync)
        what, phase = "updated weights", Phase.OPTIMIZER
        yield collective(spec, group, _GATHER, phase, what, gathers, weights, start_param_sync)


def _bucket_groups(spec: RunSpec, pipeline_rank: int) -> Iterator[tuple[Group, int]]:
    """Buckets that one call moves: their group, their elements."""
    ranks = group_size(spec.parallelism, Group.DATA_CONTEXT)
    expert_ranks = group_size(spec.parallelism, Group.EXPERT_DATA)
    for stage, chunk in enumerate(chunk_buffers(spec, pipeline_rank)):
        shared = [bucket_elements(buffer, ranks) for buffer in (chunk.untied, chunk.tied)]
        for elements in shared if stage == 0 else [sum(shared)]:
            yield Group.DATA_CONTEXT, elements
        yield Group.EXPERT_DATA, bucket_elements(chunk.experts, expert_ranks)


def bucket_elements(buffer: Buffer, ranks: int) -> int:
    """Elements of a distributed optimizer's bucket, with its padding."""
    return round_up(buffer.aligned_elements, lcm(ranks, _BUCKET_ALIGNMENT))


def _fully_sharded(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """ZeRO-2, ZeRO-3 and FSDP2; Megatron-FSDP's buckets of dense models with their padding.

    Every micro batch reduce-scatters its gradients. ZeRO-3 and FSDP2 gather each layer before its
    forward and before its backward; FSDP2 the embedding and the output layer likewise. What ZeRO-3
    has in no layer, and everything under ZeRO-2, which has one bucket, is gathered once, after the
    update.
    """
    parallelism, (dense, _) = spec.parallelism, spec.count_dense_layers(pipeline_rank)
    layers = spec.num_layers_on_stage(pipeline_rank) - dense
    rank, layer = rank_parameters(spec, pipeline_rank), layer_parameters(spec)
    among_experts = layer_parameters(spec.with_dense_layers).total if dense else 0
    experts = layer.experts if parallelism.expert > 1 else 0
    outside = rank.total - layers * layer.total - dense * among_experts
    shared = layer.total - experts
    if not parallelism.sharding.is_torch_fsdp and not spec.shape.experts:
        ranks = group_size(parallelism, Group.DATA_CONTEXT)
        rows = ranks * _widest_row(spec)
        if not parallelism.sharding.shards_weights:
            layers, outside = 0, round_up(rank.total, rows)
        shared, outside = round_up(shared, rows), round_up(outside, ranks * spec.shape.hidden)
    passes = layers * spec.microbatches
    yield from _unit(spec, Group.DATA_CONTEXT, shared, passes)
    yield from _unit(spec, Group.EXPERT_DATA, experts, passes)
    yield from _unit(spec, Group.DATA_CONTEXT, among_experts, dense * spec.microbatches)
    if parallelism.sharding.is_torch_fsdp:
        embedding = rank.word_embedding + rank.position_embedding
        for unit in (embedding, outside - embedding):
            yield from _unit(spec, Group.DATA_CONTEXT, unit, spec.microbatches)
    else:
        yield from _unit(spec, Group.DATA_CONTEXT, outside, spec.microbatches, layered=False)


def _unit(
    spec: RunSpec, group: Group, elements: int, passes: int, *, layered: bool = True
) -> Iterator[CollectiveCall]:
    """Weights in and gradients out of one unit, `passes` times in an iteration."""
    precision = bytes_per_parameter(spec)
    keeps = not (spec.parallelism.sharding.shards_weights and layered)
    gathers = passes // spec.microbatches if keeps else 2 * passes
    phase = Phase.OPTIMIZER if keeps else Phase.FORWARD
    weights, gradients = precision.weights * elements, precision.gradients * elements
    yield collective(spec, group, _GATHER, phase, "weights", gathers, weights, _FSDP)
    what, backward = "gradients", Phase.BACKWARD
    yield collective(spec, group, _SCATTER, backward, what, passes, gradients, _FSDP)


def _widest_row(spec: RunSpec) -> int:
    """Megatron-FSDP cuts a bucket where a row of each of its matrices ends (`chunk_size_factor`)."""
    shape, tensor = spec.shape, spec.parallelism.tensor
    return lcm(shape.hidden, shape.heads * shape.head_width // tensor, shape.ffn_hidden // tensor)
