"""Operations of torch.distributed, the phases of an iteration, and the bytes that a call sends."""

from __future__ import annotations

from enum import StrEnum

from parakit.config.run import Transport


class Phase(StrEnum):
    """Part of an iteration."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    PIPELINE = "pipeline"
    """Communication with neighbouring stages and waiting for them; this includes the bubble."""
    GRADIENT_SYNC = "gradient_sync"
    OPTIMIZER = "optimizer"
    OTHER = "other"
    """Time outside Megatron's own timers: loss reduction, logging, bookkeeping."""


class Operation(StrEnum):
    """Collectives and messages as torch.distributed knows them."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECEIVE = "receive"
    BARRIER = "barrier"


_NCCL = {
    Operation.ALL_REDUCE: "ring, 2(n-1)/n of the tensor",
    Operation.ALL_GATHER: "ring, (n-1)/n of the gathered tensor",
    Operation.REDUCE_SCATTER: "ring, (n-1)/n of the whole tensor",
    Operation.ALL_TO_ALL: "pairwise, (n-1)/n of the tensor",
    Operation.BROADCAST: "chain, (n-1)/n of the tensor on average over the ranks",
    Operation.REDUCE: "chain, (n-1)/n of the tensor on average over the ranks",
    Operation.GATHER: "direct, (n-1)/n of the gathered tensor, counted at the root that receives it",
    Operation.SCATTER: "direct, (n-1)/n of the whole tensor, sent by the root",
    Operation.SEND: "one message; its receive sends nothing",
    Operation.RECEIVE: "counted at its sender",
    Operation.BARRIER: "no tensor",
}
_GLOO = _NCCL | {
    Operation.REDUCE_SCATTER: "an all-reduce whose other parts are thrown away, 2(n-1)/n of the tensor",
    Operation.BROADCAST: "binomial tree, (n-1)/n of the tensor on average over the ranks",
    Operation.REDUCE: "ring whose last segments go round once more, then a gather, on average",
}
_GLOO_SEGMENT_BYTES = 1 << 20
"""`gloo::ReduceOptions::kMaxSegmentSize`."""


def describe_algorithm(operation: Operation, transport: Transport = Transport.NCCL) -> str:
    """Return a description of the algorithm that `wire_bytes` assumes for an operation.

    NCCL uses rings. The algorithms of gloo are read from its `allreduce.cc`, `allgather.cc`, `broadcast.cc` and
    `reduce.cc`, and from torch's `ProcessGroupGloo`.
    """
    return (_GLOO if transport is Transport.GLOO else _NCCL)[operation]


def wire_bytes(
    operation: Operation,
    payload_bytes: int,
    ranks: int,
    transport: Transport = Transport.NCCL,
) -> int:
    """Return the bytes that one rank sends per call, rounded down.

    The result is 0 for a receive, a barrier and a group of one rank. A reduce-scatter on gloo counts as the
    all-reduce that torch runs instead.

    Args:
        payload_bytes: Size of the full tensor: after a gather, before a scatter, or of the message sent.
    """
    if ranks == 1 or operation in (Operation.RECEIVE, Operation.BARRIER):
        return 0
    if operation is Operation.SEND:
        return payload_bytes
    if transport is Transport.GLOO:
        if operation is Operation.REDUCE:
            return _wire_bytes_of_gloo_reduce(payload_bytes, ranks)
        if operation is Operation.REDUCE_SCATTER:
            # gloo has no reduce-scatter: torch runs an all-reduce in its place.
            operation = Operation.ALL_REDUCE
    passes = 2 if operation is Operation.ALL_REDUCE else 1
    return passes * (ranks - 1) * payload_bytes // ranks


def _wire_bytes_of_gloo_reduce(payload_bytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a reduce on gloo.

    gloo splits the tensor into segments. In the ring each rank sends all segments but two to its neighbour. Then each
    rank but the root sends its chunk to the root.
    """
    segment_bytes = max(1, min(-(-payload_bytes // (2 * ranks)), _GLOO_SEGMENT_BYTES))
    segments = max(-(-payload_bytes // segment_bytes), 2 * ranks)
    segments = -(-segments // ranks) * ranks
    ring_bytes = payload_bytes * (segments - 2) // segments
    bytes_to_root = payload_bytes * (ranks - 1) // ranks**2
    return ring_bytes + bytes_to_root
