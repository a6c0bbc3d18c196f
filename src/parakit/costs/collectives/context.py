"""Calls over context-parallel ranks: every query needs the keys and values of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.groups import Group
from parakit.config.run import RunSpec
from parakit.costs.collectives.call import CollectiveCall, collective, layer_passes
from parakit.costs.operations import Operation, Phase

_RING = "Transformer Engine, AttnFuncWithCPAndKVP2P; arXiv:2310.01889"
_GATHER = "Transformer Engine, AttnFuncWithCPAndKVAllGather; megatron_patches on hosts without it"
_ALL_TO_ALL = "Transformer Engine, AttnFuncWithCPAndQKVOA2A; arXiv:2309.14509"


def context_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the calls over CP in one iteration by `--cp-comm-type`; nothing if no algorithm is
    chosen.
    """
    if spec.parallelism.context > 1 and spec.cp_comm_type:
        algorithm = {"p2p": _ring_calls, "all_gather": _all_gather_calls, "a2a": _all_to_all_calls}
        yield from algorithm[spec.cp_comm_type](spec)


def mtp_boundary_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the sends between context-parallel ranks with which multi-token prediction shifts tokens, positions,
    labels and mask by one token.

    A rank has two chunks of the sequence. Each chunk receives one token from a neighbouring rank, in the default
    group (`multi_token_prediction.py: roll_tensor`). Nothing is yielded without context parallelism.
    """
    if spec.parallelism.context == 1:
        return
    calls = min(2, spec.parallelism.context - 1) * spec.shape.total_mtp_layers * spec.microbatches
    samples = spec.batch.micro_batch_size
    source = "multi_token_prediction.py: roll_tensor"
    for description, tensors, width in (
        ("token, position and label after a chunk", 3, 8),
        ("mask of the label after a chunk", 1, 4),
    ):
        send, sent, times = Operation.SEND, width * samples, tensors * calls
        yield collective(spec, Group.WORLD, send, Phase.FORWARD, description, times, sent, source)


def _ring_calls(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the sends of ring attention. Forward sends K and V, and backward sends K, V and their gradients.

    With c context-parallel ranks, each of these tensors takes c−1 steps around the ring.
    """
    steps = spec.parallelism.context - 1
    payload = _heads_bytes(spec, 2 * spec.shape.query_groups)
    forwards, backwards = layer_passes(spec, "core_attn")
    for phase, description, passes in (
        (Phase.FORWARD, "K and V around the ring", forwards),
        (Phase.BACKWARD, "K and V again", backwards),
        (Phase.BACKWARD, "gradients of K and V", backwards),
    ):
        calls, send = steps * passes, Operation.SEND
        yield collective(
            spec, Group.CONTEXT, send, phase, description, calls, payload, _RING, overlappable=True
        )


def _all_gather_calls(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the all-gathers of K and V in forward and again in backward, and the reduce-scatters of the gradients
    of K and V.
    """
    payload = spec.parallelism.context * _heads_bytes(spec, spec.shape.query_groups)
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    forwards, backwards = layer_passes(spec, "core_attn")
    for operation, phase, description, passes in (
        (gather, Phase.FORWARD, "K, V", forwards),
        (gather, Phase.BACKWARD, "K, V again", backwards),
        (scatter, Phase.BACKWARD, "gradients of K, V", backwards),
    ):
        yield collective(
            spec, Group.CONTEXT, operation, phase, description, 2 * passes, payload, _GATHER
        )


def _all_to_all_calls(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the all-to-alls of attention with `a2a` context parallelism, in forward and backward.

    Before attention, Q, K and V change from a split sequence to split heads. After attention, the output changes
    back to a split sequence.
    """
    queries = _heads_bytes(spec, spec.shape.heads)
    keys = _heads_bytes(spec, spec.shape.query_groups)
    forwards, backwards = layer_passes(spec, "core_attn")
    for phase, description, passes, payload in (
        (Phase.FORWARD, "Q and output", forwards, queries),
        (Phase.FORWARD, "K and V", forwards, keys),
        (Phase.BACKWARD, "gradients of Q and output", backwards, queries),
        (Phase.BACKWARD, "gradients of K and V", backwards, keys),
    ):
        exchange, calls = Operation.ALL_TO_ALL, 2 * passes
        yield collective(
            spec, Group.CONTEXT, exchange, phase, description, calls, payload, _ALL_TO_ALL
        )


def _heads_bytes(spec: RunSpec, heads: int) -> int:
    """Return the bytes of `heads` heads of one micro batch on one rank."""
    width = heads * spec.shape.head_width // spec.parallelism.tensor
    return spec.element_bytes * spec.micro_batch_tokens * width
