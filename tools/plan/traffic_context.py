"""Calls in the context-parallel group: keys and values that meet every query."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.wire import Traffic
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group
from tools.spec.run import Recompute, RunSpec

_RING = "Transformer Engine, AttnFuncWithCPAndKVP2P; arXiv:2310.01889"
_GATHER = "Transformer Engine, AttnFuncWithCPAndKVAllGather; megatron_patches on hosts without it"
_ALL_TO_ALL = "Transformer Engine, AttnFuncWithCPAndQKVOA2A; arXiv:2309.14509"


def context_traffic(configuration: RunSpec) -> Iterator[Traffic]:
    """Calls over CP in one iteration, by the configuration's `--cp-comm-type`."""
    if configuration.parallelism.context == 1:
        return
    algorithm = {"p2p": _ring, "all_gather": _gathered, "a2a": _exchanged}
    yield from algorithm[configuration.cp_comm_type](configuration)


def _layer_passes(configuration: RunSpec) -> int:
    return configuration.layers_a_stage * configuration.microbatches


def _forwards(configuration: RunSpec) -> int:
    passes = _layer_passes(configuration)
    return 2 * passes if configuration.recompute is Recompute.FULL else passes


def _width_bytes(configuration: RunSpec, heads: int) -> int:
    """Bytes of `heads` heads of one micro batch on one rank."""
    width = heads * configuration.shape.head_width // configuration.parallelism.tensor
    return configuration.element_bytes * configuration.tokens * width


def _ring(configuration: RunSpec) -> Iterator[Traffic]:
    """K and V go around in c−1 steps; backward sends them again, and their gradients with them."""
    ranks = configuration.parallelism.context
    steps = ranks - 1
    keys_and_values = _width_bytes(configuration, 2 * configuration.shape.query_groups)
    for phase, what, passes in (
        (Phase.FORWARD, "K and V around the ring", _forwards(configuration)),
        (Phase.BACKWARD, "K and V again", _layer_passes(configuration)),
        (Phase.BACKWARD, "gradients of K and V", _layer_passes(configuration)),
    ):
        yield Traffic(
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


def _gathered(configuration: RunSpec) -> Iterator[Traffic]:
    """K and V are gathered, gathered again in backward, and their gradients scattered."""
    ranks = configuration.parallelism.context
    whole = ranks * _width_bytes(configuration, configuration.shape.query_groups)
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    forwards, passes = _forwards(configuration), _layer_passes(configuration)
    for operation, phase, what, calls in (
        (gather, Phase.FORWARD, "K, V", forwards),
        (gather, Phase.BACKWARD, "K, V again", passes),
        (scatter, Phase.BACKWARD, "gradients of K, V", passes),
    ):
        yield Traffic(Group.CONTEXT, ranks, operation, phase, what, 2 * calls, whole, _GATHER)


def _exchanged(configuration: RunSpec) -> Iterator[Traffic]:
    """Q, K, V and the output change from a split sequence to split heads and back."""
    ranks, shape = configuration.parallelism.context, configuration.shape
    queries = _width_bytes(configuration, shape.heads)
    keys = _width_bytes(configuration, shape.query_groups)
    forwards, passes = _forwards(configuration), _layer_passes(configuration)
    exchange = Operation.ALL_TO_ALL
    for phase, calls, prefix in (
        (Phase.FORWARD, forwards, ""),
        (Phase.BACKWARD, passes, "gradients of "),
    ):
        for what, payload in ((f"{prefix}Q and output", queries), (f"{prefix}K and V", keys)):
            yield Traffic(
                Group.CONTEXT, ranks, exchange, phase, what, 2 * calls, payload, _ALL_TO_ALL
            )
