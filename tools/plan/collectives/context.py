"""Calls in the context-parallel group: keys and values that meet every query."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.collectives.call import CollectiveCall
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group
from tools.spec.run import Recompute, RunSpec

_RING = "Transformer Engine, AttnFuncWithCPAndKVP2P; arXiv:2310.01889"
_GATHER = "Transformer Engine, AttnFuncWithCPAndKVAllGather; megatron_patches on hosts without it"
_ALL_TO_ALL = "Transformer Engine, AttnFuncWithCPAndQKVOA2A; arXiv:2309.14509"


def context_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Calls over CP in one iteration, by the configuration's `--cp-comm-type`."""
    if spec.parallelism.context == 1:
        return
    algorithm = {"p2p": _ring, "all_gather": _gathered, "a2a": _exchanged}
    yield from algorithm[spec.cp_comm_type](spec)


def _layer_passes(spec: RunSpec) -> int:
    return spec.layers_a_stage * spec.microbatches


def _forwards(spec: RunSpec) -> int:
    passes = _layer_passes(spec)
    return 2 * passes if spec.recompute is Recompute.FULL else passes


def _width_bytes(spec: RunSpec, heads: int) -> int:
    """Bytes of `heads` heads of one micro batch on one rank."""
    width = heads * spec.shape.head_width // spec.parallelism.tensor
    return spec.element_bytes * spec.tokens * width


def _ring(spec: RunSpec) -> Iterator[CollectiveCall]:
    """K and V go around in c−1 steps; backward sends them again, and their gradients with them."""
    ranks = spec.parallelism.context
    steps = ranks - 1
    keys_and_values = _width_bytes(spec, 2 * spec.shape.query_groups)
    for phase, what, passes in (
        (Phase.FORWARD, "K and V around the ring", _forwards(spec)),
        (Phase.BACKWARD, "K and V again", _layer_passes(spec)),
        (Phase.BACKWARD, "gradients of K and V", _layer_passes(spec)),
    ):
        yield CollectiveCall(
            Group.CONTEXT,
            ranks,
            Operation.SEND,
            phase,
            what,
            steps * passes,
            keys_and_values,
            _RING,
            hideable=True,
        )


def _gathered(spec: RunSpec) -> Iterator[CollectiveCall]:
    """K and V are gathered, gathered again in backward, and their gradients scattered."""
    ranks = spec.parallelism.context
    whole = ranks * _width_bytes(spec, spec.shape.query_groups)
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    forwards, passes = _forwards(spec), _layer_passes(spec)
    for operation, phase, what, calls in (
        (gather, Phase.FORWARD, "K, V", forwards),
        (gather, Phase.BACKWARD, "K, V again", passes),
        (scatter, Phase.BACKWARD, "gradients of K, V", passes),
    ):
        yield CollectiveCall(
            Group.CONTEXT, ranks, operation, phase, what, 2 * calls, whole, _GATHER
        )


def _exchanged(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Q, K, V and the output change from a split sequence to split heads and back."""
    ranks, shape = spec.parallelism.context, spec.shape
    queries = _width_bytes(spec, shape.heads)
    keys = _width_bytes(spec, shape.query_groups)
    forwards, passes = _forwards(spec), _layer_passes(spec)
    exchange = Operation.ALL_TO_ALL
    for phase, calls, prefix in (
        (Phase.FORWARD, forwards, ""),
        (Phase.BACKWARD, passes, "gradients of "),
    ):
        for what, payload in ((f"{prefix}Q and output", queries), (f"{prefix}K and V", keys)):
            yield CollectiveCall(
                Group.CONTEXT, ranks, exchange, phase, what, 2 * calls, payload, _ALL_TO_ALL
            )
