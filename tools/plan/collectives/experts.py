"""Calls that move tokens to their experts and back, by `--moe-token-dispatcher-type`.

`alltoall`: how many tokens a rank receives depends on the router, and on average it is as many as it
sends, top-k copies of its own. So the payloads summed over the EP group are exact, those of one rank
are means, and so is what of them stays on the rank. `allgather`: every rank gets all tokens of its
group, and everything is exact. Probabilities travel in the model's dtype (`--moe-router-dtype` is not
modelled).
"""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.collectives.call import CollectiveCall
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group
from tools.spec.run import Recompute, RunSpec, TokenDispatcher, Transport

_DISPATCHER = "transformer/moe/token_dispatcher.py: MoEAlltoAllTokenDispatcher"
_GATHERING = "transformer/moe/token_dispatcher.py: MoEAllGatherTokenDispatcher"
_INT64 = 8


def expert_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Calls over EP, and over the TP ranks that share each expert."""
    if not spec.shape.experts:
        return
    if spec.shape.load_balancing:
        yield _balance(spec)
    if spec.token_dispatcher == TokenDispatcher.ALL_GATHER:
        yield from _gathered(spec)
        return
    if _expert_ranks(spec) > 1:
        yield _token_counts(spec)
    if spec.parallelism.expert > 1:
        yield from _exchanges(spec)
    if spec.parallelism.tensor_of_experts > 1:
        yield from _expert_tensor_parallel(spec)


def routed_tokens(spec: RunSpec) -> int:
    """Copies of its own tokens that a rank routes in one micro batch."""
    tokens = spec.tokens // spec.sequence_shards
    return tokens * spec.shape.experts_per_token


def _expert_ranks(spec: RunSpec) -> int:
    """ETP×EP: the ranks that hold one copy of a layer's experts."""
    return spec.parallelism.expert * spec.parallelism.tensor_of_experts


def _passes(spec: RunSpec) -> tuple[int, int]:
    """Layer passes in forward (recomputation included) and in backward."""
    backward = spec.layers_a_stage * spec.microbatches
    return backward * (2 if spec.recompute is Recompute.FULL else 1), backward


def _token_counts(spec: RunSpec) -> CollectiveCall:
    """Every rank tells the others how many tokens it has for each expert."""
    ranks = _expert_ranks(spec)
    return CollectiveCall(
        Group.TENSOR_EXPERT,
        ranks,
        Operation.ALL_GATHER,
        Phase.FORWARD,
        "tokens for each expert",
        _passes(spec)[0],
        ranks * spec.shape.experts * _INT64,
        f"{_DISPATCHER}.preprocess",
    )


def _balance(spec: RunSpec) -> CollectiveCall:
    """The auxiliary loss is that of whole samples: tokens of each expert, over the ranks of one.

    It is computed where gradients are: once a layer, in the recomputation if there is one.
    """
    parallelism = spec.parallelism
    return CollectiveCall(
        Group.TENSOR_CONTEXT,
        parallelism.tensor * parallelism.context,
        Operation.ALL_REDUCE,
        Phase.FORWARD,
        "tokens for each expert, for the auxiliary loss",
        _passes(spec)[1],
        spec.shape.experts * _INT64,
        "transformer/moe/router.py: TopKRouter._apply_aux_loss",
    )


def _exchanges(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Tokens out and back, their probabilities out; backward returns each one's gradient."""
    ranks = spec.parallelism.expert
    routed = routed_tokens(spec)
    tokens = routed * spec.shape.hidden * spec.element_bytes
    forwards, backwards = _passes(spec)
    for what, payload, times in (
        ("tokens to their experts and back", tokens, 2),
        ("routing probabilities", routed * spec.element_bytes, 1),
    ):
        for phase, calls in ((Phase.FORWARD, forwards), (Phase.BACKWARD, backwards)):
            yield CollectiveCall(
                Group.EXPERT,
                ranks,
                Operation.ALL_TO_ALL,
                phase,
                what,
                times * calls,
                payload,
                _DISPATCHER,
            )


def _gathered(spec: RunSpec) -> Iterator[CollectiveCall]:
    """All tokens of ETP×EP on each of its ranks, with their choice; outputs summed on the way back."""
    ranks = _expert_ranks(spec)
    if ranks == 1:
        return
    shape, element = spec.shape, spec.element_bytes
    tokens = ranks * (spec.tokens // spec.sequence_shards)
    states, choices = tokens * shape.hidden * element, tokens * shape.experts
    forwards, backwards = _passes(spec)
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    for operation, phase, what, payload, calls in (
        (gather, Phase.FORWARD, "which token goes where", choices, forwards),
        (gather, Phase.FORWARD, "routing probabilities", choices * element, forwards),
        (gather, Phase.FORWARD, "tokens to all experts", states, forwards),
        (scatter, Phase.FORWARD, "outputs of experts", states, forwards),
        (gather, Phase.BACKWARD, "gradients of the outputs", states, backwards),
        (scatter, Phase.BACKWARD, "gradients of the tokens", states, backwards),
        (scatter, Phase.BACKWARD, "gradients of the probabilities", choices * element, backwards),
    ):
        yield CollectiveCall(
            Group.TENSOR_EXPERT, ranks, operation, phase, what, calls, payload, _GATHERING
        )


def _expert_tensor_parallel(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Each expert is split as well: its inputs are gathered, its outputs scattered.

    gloo wants equal parts for that, so on CPU ranks both are all-to-alls of the same bytes
    (`megatron_patches/cpu/variable_size_collectives.py`).
    """
    ranks = spec.parallelism.tensor_of_experts
    forwards, backwards = _passes(spec)
    routed = ranks * routed_tokens(spec)
    element = spec.element_bytes
    tokens = routed * spec.shape.hidden * element
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    if spec.transport is Transport.GLOO:
        gather = scatter = Operation.ALL_TO_ALL
    for operation, phase, what, payload, calls in (
        (gather, Phase.FORWARD, "inputs of experts", tokens, forwards),
        (gather, Phase.FORWARD, "their probabilities", routed * element, forwards),
        (scatter, Phase.FORWARD, "outputs of experts", tokens, forwards),
        (gather, Phase.BACKWARD, "gradients of the outputs", tokens, backwards),
        (scatter, Phase.BACKWARD, "gradients of the probabilities", routed * element, backwards),
        (scatter, Phase.BACKWARD, "gradients of the inputs", tokens, backwards),
    ):
        yield CollectiveCall(
            Group.EXPERT_TENSOR, ranks, operation, phase, what, calls, payload, _DISPATCHER
        )
