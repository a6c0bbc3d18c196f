"""Calls over the data-parallel ranks: gradients, and the weights or shards that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from tools.plan.configuration import Configuration
from tools.plan.memory import PRECISIONS
from tools.plan.parameters import Parameters, rank_parameters
from tools.plan.tensors import chunk_tensors
from tools.plan.wire import Group, Operation, Phase, Traffic
from tools.records import Sharding

_BUCKETS = "distributed/param_and_grad_buffer.py: _ParamAndGradBucketGroup"
_FSDP = "distributed/fsdp/src/megatron_fsdp; torch.distributed.fsdp.fully_shard"
_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


def gradient_traffic(configuration: Configuration, pipeline_rank: int) -> Iterator[Traffic]:
    """Gradient and weight calls of one pipeline rank in one iteration."""
    sharding = configuration.parallelism.sharding
    if sharding is Sharding.NONE:
        yield from _all_reduced(configuration, pipeline_rank)
    elif sharding is Sharding.ZERO1:
        yield from _distributed_optimizer(configuration, pipeline_rank)
    else:
        yield from _fully_sharded(configuration, pipeline_rank)


def data_parallel_ranks(configuration: Configuration) -> tuple[int, int]:
    """Ranks that share the gradients of ordinary weights, and of experts."""
    parallelism = configuration.parallelism
    ranks = parallelism.data * parallelism.context
    return ranks, ranks // parallelism.expert


def _all_reduced(configuration: Configuration, pipeline_rank: int) -> Iterator[Traffic]:
    """DDP: one all-reduce of each model chunk's whole buffer (buckets only split it in overlap)."""
    gradient = PRECISIONS[configuration.dtype].gradients
    ranks, expert_ranks = data_parallel_ranks(configuration)
    for tensors in chunk_tensors(configuration, pipeline_rank):
        for group, size, elements, what in (
            (Group.DATA_CONTEXT, ranks, sum(tensors.shared), "gradients"),
            (Group.EXPERT_DATA, expert_ranks, sum(tensors.experts), "gradients of experts"),
        ):
            yield Traffic(
                group,
                size,
                Operation.ALL_REDUCE,
                Phase.GRADIENT_SYNC,
                what,
                1,
                gradient * elements,
                f"{_BUCKETS}.start_grad_sync",
            )


def _distributed_optimizer(configuration: Configuration, pipeline_rank: int) -> Iterator[Traffic]:
    """Reduce-scatter of gradients, all-gather of updated weights, over padded buckets.

    A tied embedding on several stages has a bucket of its own. Every tensor starts at a multiple of
    64 elements and every bucket ends at one of lcm(ranks, 128).
    """
    precision = PRECISIONS[configuration.dtype]
    ranks, expert_ranks = data_parallel_ranks(configuration)
    for tensors in chunk_tensors(configuration, pipeline_rank):
        for group, size, sizes in (
            (Group.DATA_CONTEXT, ranks, tensors.shared_without_tied),
            (Group.DATA_CONTEXT, ranks, tensors.tied),
            (Group.EXPERT_DATA, expert_ranks, tensors.experts),
        ):
            elements = bucket_elements(sizes, size)
            for operation, phase, what, width, function in (
                (
                    Operation.REDUCE_SCATTER,
                    Phase.GRADIENT_SYNC,
                    "gradients",
                    precision.gradients,
                    "start_grad_sync",
                ),
                (
                    Operation.ALL_GATHER,
                    Phase.OPTIMIZER,
                    "updated weights",
                    precision.weights,
                    "start_param_sync",
                ),
            ):
                source = f"{_BUCKETS}.{function}"
                yield Traffic(group, size, operation, phase, what, 1, width * elements, source)


def bucket_elements(sizes: tuple[int, ...], ranks: int) -> int:
    """Elements of a distributed optimizer's bucket, with its padding."""
    aligned = sum(_round_up(size, _ALIGNMENT) for size in sizes)
    return _round_up(aligned, lcm(ranks, _BUCKET_ALIGNMENT))


def _fully_sharded(configuration: Configuration, pipeline_rank: int) -> Iterator[Traffic]:
    """ZeRO-2, ZeRO-3 and FSDP2: totals by unit of one layer, not call for call.

    Every micro batch reduce-scatters its gradients; ZeRO-3 and FSDP2 gather weights before each
    forward and each backward, ZeRO-2 once after the update.
    """
    precision = PRECISIONS[configuration.dtype]
    parameters = rank_parameters(configuration.shape, configuration.parallelism, pipeline_rank)
    passes = configuration.microbatches
    gathers = 2 * passes if configuration.parallelism.sharding is not Sharding.ZERO2 else 1
    units = configuration.layers_a_stage + 1
    gathered_in = Phase.FORWARD if gathers > 1 else Phase.OPTIMIZER
    for group, size, elements in _sharded_groups(configuration, parameters):
        for operation, phase, what, calls, width in (
            (Operation.ALL_GATHER, gathered_in, "weights", gathers, precision.weights),
            (Operation.REDUCE_SCATTER, Phase.BACKWARD, "gradients", passes, precision.gradients),
        ):
            payload = width * elements // units
            yield Traffic(group, size, operation, phase, what, calls * units, payload, _FSDP)


def _sharded_groups(
    configuration: Configuration, parameters: Parameters
) -> tuple[tuple[Group, int, int], ...]:
    ranks, expert_ranks = data_parallel_ranks(configuration)
    if configuration.parallelism.expert == 1:
        return ((Group.DATA_CONTEXT, ranks, parameters.total),)
    return (
        (Group.DATA_CONTEXT, ranks, parameters.shared),
        (Group.EXPERT_DATA, expert_ranks, parameters.experts),
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
