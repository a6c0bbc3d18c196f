"""Calls over data-parallel ranks: gradients, and the weights or shards that the update needs."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from parakit.config.groups import Group, group_size
from parakit.config.model import round_up
from parakit.config.run import RunSpec
from parakit.costs.collectives.call import CollectiveCall, collective
from parakit.costs.memory import bytes_per_parameter
from parakit.costs.operations import Operation, Phase
from parakit.costs.tensors import (
    Buffer,
    chunk_buffers,
    layer_parameters,
    rank_parameters,
    trained_parameters,
)

_BUCKETS = "distributed/param_and_grad_buffer.py: _ParamAndGradBucketGroup"
_FSDP = "distributed/fsdp/src/megatron_fsdp; torch.distributed.fsdp.fully_shard"
_BUCKET_ALIGNMENT = 128

_REDUCE, _SCATTER = Operation.ALL_REDUCE, Operation.REDUCE_SCATTER
_GATHER, _SYNC = Operation.ALL_GATHER, Phase.GRADIENT_SYNC


def gradient_collectives(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Yield the calls of one pipeline rank per iteration that reduce gradients or gather weights."""
    sharding = spec.parallelism.sharding
    if sharding.wraps_modules:
        yield from _fsdp_calls(spec, pipeline_rank)
        if spec.lora:
            yield from _adapter_gradient_calls(spec, pipeline_rank)
    elif sharding:
        yield from _distributed_optimizer_calls(spec, pipeline_rank)
    else:
        yield from _ddp_calls(spec, pipeline_rank)


def _ddp_calls(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of DDP: one of gradients and one of expert gradients per model chunk.

    Each all-reduce carries the chunk's full buffer. With overlapping, Megatron splits these bytes into buckets,
    and this is not modelled.
    """
    width, source = bytes_per_parameter(spec).gradients, f"{_BUCKETS}.start_grad_sync"
    for chunk in chunk_buffers(spec, pipeline_rank):
        for group, description, buffer in (
            (Group.DATA_CONTEXT, "gradients", chunk.untied + chunk.tied),
            (Group.EXPERT_DATA, "gradients of experts", chunk.experts),
        ):
            payload = width * buffer.elements
            yield collective(spec, group, _REDUCE, _SYNC, description, 1, payload, source)


def _distributed_optimizer_calls(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Yield the distributed optimizer's calls: reduce-scatters of gradients, and all-gathers of
    updated weights.

    Calls carry padded buckets: every tensor starts at a multiple of 64 elements, and every bucket ends at a
    multiple of lcm(ranks, 128). A tied embedding on several stages has its own bucket. In a rank's first virtual
    stage that bucket also has its own call (`partition_buckets(force_single_bucket_group=…)`).

    With expert parallelism Megatron chains two optimizers, and each gathers the weights of both
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
        description, phase = "updated weights", Phase.OPTIMIZER
        yield collective(
            spec, group, _GATHER, phase, description, gathers, weights, start_param_sync
        )


def _bucket_groups(spec: RunSpec, pipeline_rank: int) -> Iterator[tuple[Group, int]]:
    """Yield one pair per call: its group, and the elements that the call moves, padding included."""
    ranks = group_size(spec.parallelism, Group.DATA_CONTEXT)
    expert_ranks = group_size(spec.parallelism, Group.EXPERT_DATA)
    for stage, chunk in enumerate(chunk_buffers(spec, pipeline_rank)):
        untied = bucket_elements(chunk.untied, ranks)
        tied = bucket_elements(chunk.tied, ranks)
        if stage == 0:
            # The tied tensors of the first virtual stage have a call of their own.
            yield Group.DATA_CONTEXT, untied
            yield Group.DATA_CONTEXT, tied
        else:
            yield Group.DATA_CONTEXT, untied + tied
        yield Group.EXPERT_DATA, bucket_elements(chunk.experts, expert_ranks)


def bucket_elements(buffer: Buffer, ranks: int) -> int:
    """Return the elements of a distributed optimizer's bucket, padding included."""
    return round_up(buffer.aligned_elements, lcm(ranks, _BUCKET_ALIGNMENT))


def _fsdp_calls(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Yield the weight gathers and gradient reduce-scatters of ZeRO-2, ZeRO-3 and FSDP2.

    Every micro batch reduce-scatters its gradients. ZeRO-3 and FSDP2 gather each layer before its
    forward and before its backward. FSDP2 gathers the embedding and the output layer in this way too. ZeRO-3
    gathers the tensors outside layers once after the update. ZeRO-2 gathers all tensors, in one bucket, once
    after the update. For dense models, the buckets of ZeRO-2 and ZeRO-3 (Megatron-FSDP) are padded.
    """
    sharding, microbatches = spec.parallelism.sharding, spec.microbatches
    rank, layer = rank_parameters(spec, pipeline_rank), layer_parameters(spec)
    # A model with experts may have dense layers among the layers with experts.
    dense_layers, _ = spec.count_dense_layers(pipeline_rank)
    layers = spec.num_layers_on_stage(pipeline_rank) - dense_layers
    dense_layer = layer_parameters(spec.with_dense_layers).total if dense_layers else 0
    outside_layers = rank.total - layers * layer.total - dense_layers * dense_layer
    experts = layer.experts if spec.parallelism.expert > 1 else 0
    layer_without_experts = layer.total - experts
    if not sharding.is_torch_fsdp and not spec.shape.experts:
        ranks = group_size(spec.parallelism, Group.DATA_CONTEXT)
        if not sharding.shards_weights:
            # ZeRO-2 has all tensors of the rank in one bucket.
            layers, outside_layers = 0, round_up(rank.total, ranks * _widest_row(spec))
        layer_without_experts = round_up(layer_without_experts, ranks * _widest_row(spec))
        outside_layers = round_up(outside_layers, ranks * spec.shape.hidden)
    passes = layers * microbatches
    yield from _unit_calls(spec, Group.DATA_CONTEXT, layer_without_experts, passes)
    yield from _unit_calls(spec, Group.EXPERT_DATA, experts, passes)
    yield from _unit_calls(spec, Group.DATA_CONTEXT, dense_layer, dense_layers * microbatches)
    if sharding.is_torch_fsdp:
        embedding = rank.word_embedding + rank.position_embedding
        for unit in (embedding, outside_layers - embedding):
            yield from _unit_calls(spec, Group.DATA_CONTEXT, unit, microbatches)
    else:
        yield from _unit_calls(
            spec, Group.DATA_CONTEXT, outside_layers, microbatches, layered=False
        )


def _adapter_gradient_calls(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Yield the reduce-scatters of adapters' gradients under ZeRO-2, ZeRO-3 and FSDP2, one per micro batch."""
    trained, width = trained_parameters(spec, pipeline_rank), bytes_per_parameter(spec).gradients
    for group, elements in (
        (Group.DATA_CONTEXT, trained.shared),
        (Group.EXPERT_DATA, trained.experts),
    ):
        description, calls, payload = "gradients of adapters", spec.microbatches, width * elements
        yield collective(spec, group, _SCATTER, Phase.BACKWARD, description, calls, payload, _FSDP)


def _unit_calls(
    spec: RunSpec, group: Group, elements: int, passes: int, *, layered: bool = True
) -> Iterator[CollectiveCall]:
    """Yield the weight gathers and the gradient reduce-scatters of units of `elements` parameters.

    With LoRA the units are frozen and have no gradients.

    Args:
        spec: The run.
        group: Group of the ranks over which the units are sharded.
        elements: Parameters of one unit.
        passes: Passes through such units per iteration: number of units times number of micro batches.
        layered: True if ZeRO-3 and FSDP2 gather the weights before each forward and each backward. Otherwise
            each unit is gathered once per iteration.
    """
    precision = bytes_per_parameter(spec)
    if spec.parallelism.sharding.shards_weights and layered:
        num_gathers, phase = 2 * passes, Phase.FORWARD
    else:
        num_gathers, phase = passes // spec.microbatches, Phase.OPTIMIZER
    weight_bytes, gradient_bytes = precision.weights * elements, precision.gradients * elements
    yield collective(spec, group, _GATHER, phase, "weights", num_gathers, weight_bytes, _FSDP)
    if spec.lora:
        return
    description, backward = "gradients", Phase.BACKWARD
    yield collective(spec, group, _SCATTER, backward, description, passes, gradient_bytes, _FSDP)


def _widest_row(spec: RunSpec) -> int:
    """Return a number of elements that is a multiple of the row length of each matrix.

    Megatron-FSDP cuts buckets only at multiples of this number (`chunk_size_factor`).
    """
    shape, tensor = spec.shape, spec.parallelism.tensor
    return lcm(shape.hidden, shape.heads * shape.head_width // tensor, shape.ffn_hidden // tensor)
