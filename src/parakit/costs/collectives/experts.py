"""Calls that move tokens to their experts and back, by `--moe-token-dispatcher-type`.

`alltoall`: how many tokens a rank receives depends on the router, and on average it is as many as it
sends, top-k copies of its own. So the payloads summed over the EP group are exact, those of one rank
are means, and so is what of them stays on the rank. Where an imbalance is stated, payloads are what the
busiest rank receives, which on the way back it sends; of a padded capacity they are exact.
`allgather`: every rank gets all tokens of its group, and everything is exact. Probabilities travel in
the model's dtype (`--moe-router-dtype` is not modelled).
"""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.groups import Group, group_size
from parakit.config.run import RunSpec, TokenDispatcher, Transport
from parakit.costs.collectives.call import CollectiveCall, collective, layer_passes
from parakit.costs.operations import Operation, Phase

_EXCHANGING = "transformer/moe/token_dispatcher.py: MoEAlltoAllTokenDispatcher"
_GATHERING = "transformer/moe/token_dispatcher.py: MoEAllGatherTokenDispatcher"
_AUXILIARY_LOSS = "transformer/moe/router.py: TopKRouter._apply_aux_loss"
_INT64 = 8

_Row = tuple[Operation, Phase, str, int]
"""Operation, phase, what is moved, payload of one call in bytes."""


def expert_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Calls over EP, and over the TP ranks that share each expert."""
    if len(spec.shape.blocks) > 1:
        for times, kind in spec.block_specs:
            yield from (
                call._replace(calls=times * call.calls) for call in expert_collectives(kind)
            )
        return
    if not spec.shape.experts:
        return
    if spec.shape.load_balancing:
        yield _balance(spec)
    if spec.token_dispatcher == TokenDispatcher.ALL_GATHER:
        yield from _layer_calls(spec, Group.TENSOR_EXPERT, _gathered(spec), _GATHERING)
        return
    if not spec.expert_load.pads_to_capacity:  # Else every rank knows them.
        yield from _layer_calls(
            spec, Group.TENSOR_EXPERT, [_token_counts(spec)], f"{_EXCHANGING}.preprocess"
        )
    chosen = routed_tokens(spec) * spec.element_bytes
    width = spec.shape.latent_experts or spec.shape.hidden
    tokens = _out_and_back("tokens to their experts and back", chosen * width)
    probabilities = _out_and_back("routing probabilities", chosen)
    yield from _layer_calls(spec, Group.EXPERT, tokens, _EXCHANGING, times=2)
    yield from _layer_calls(spec, Group.EXPERT, probabilities, _EXCHANGING)
    if spec.parallelism.effective_expert_tensor > 1:
        yield from _layer_calls(spec, Group.EXPERT_TENSOR, _split_experts(spec), _EXCHANGING)


def routed_tokens(spec: RunSpec) -> int:
    """Copies of tokens that a rank sends or receives in one micro batch, whichever is more."""
    copies = spec.micro_batch_tokens // spec.sequence_shards * spec.shape.experts_per_token
    return round(copies * max(spec.expert_send_ratio, spec.expert_receive_ratio))


def _layer_calls(
    spec: RunSpec, group: Group, rows: list[_Row], source: str, times: int = 1
) -> Iterator[CollectiveCall]:
    """Each row so many times a pass through a layer, in its direction; nothing over a single rank."""
    if group_size(spec.parallelism, group) == 1:
        return
    forwards, backwards = layer_passes(spec, "moe")
    for operation, phase, what, payload in rows:
        calls = times * (forwards if phase is Phase.FORWARD else backwards)
        yield collective(spec, group, operation, phase, what, calls, payload, source)


def _balance(spec: RunSpec) -> CollectiveCall:
    """The auxiliary loss is that of whole samples: tokens of each expert, over the ranks of one.

    It is computed where gradients are: once a layer, in the recomputation if there is one.
    """
    return collective(
        spec,
        Group.TENSOR_CONTEXT,
        Operation.ALL_REDUCE,
        Phase.FORWARD,
        "tokens for each expert, for the auxiliary loss",
        layer_passes(spec)[1],
        spec.shape.experts * _INT64,
        _AUXILIARY_LOSS,
    )


def _token_counts(spec: RunSpec) -> _Row:
    """Every rank reports to the others how many tokens it has for each expert."""
    ranks = group_size(spec.parallelism, Group.TENSOR_EXPERT)
    payload = ranks * spec.shape.experts * _INT64
    return Operation.ALL_GATHER, Phase.FORWARD, "tokens for each expert", payload


def _out_and_back(what: str, payload: int) -> list[_Row]:
    """Sent to the experts in forward; backward returns the gradients."""
    exchange = Operation.ALL_TO_ALL
    return [(exchange, phase, what, payload) for phase in (Phase.FORWARD, Phase.BACKWARD)]


def _gathered(spec: RunSpec) -> list[_Row]:
    """All tokens of ETP×EP on each of its ranks, with their choice; outputs summed on the way back."""
    ranks, element = group_size(spec.parallelism, Group.TENSOR_EXPERT), spec.element_bytes
    tokens = ranks * (spec.micro_batch_tokens // spec.sequence_shards)
    states, choices = tokens * spec.shape.hidden * element, tokens * spec.shape.experts
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    return [
        (gather, Phase.FORWARD, "which token goes where", choices),
        (gather, Phase.FORWARD, "routing probabilities", choices * element),
        (gather, Phase.FORWARD, "tokens to all experts", states),
        (scatter, Phase.FORWARD, "outputs of experts", states),
        (gather, Phase.BACKWARD, "gradients of the outputs", states),
        (scatter, Phase.BACKWARD, "gradients of the tokens", states),
        (scatter, Phase.BACKWARD, "gradients of the probabilities", choices * element),
    ]


def _split_experts(spec: RunSpec) -> list[_Row]:
    """Each expert is split as well: its inputs are gathered, its outputs scattered.

    gloo wants equal parts for that, so on CPU ranks both are all-to-alls of the same bytes
    (`megatron_patches/cpu/variable_size_collectives.py`).
    """
    chosen = spec.parallelism.effective_expert_tensor * routed_tokens(spec) * spec.element_bytes
    tokens = chosen * spec.shape.hidden
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    if spec.transport is Transport.GLOO:
        gather = scatter = Operation.ALL_TO_ALL
    return [
        (gather, Phase.FORWARD, "inputs of experts", tokens),
        (gather, Phase.FORWARD, "their probabilities", chosen),
        (scatter, Phase.FORWARD, "outputs of experts", tokens),
        (gather, Phase.BACKWARD, "gradients of the outputs", tokens),
        (scatter, Phase.BACKWARD, "gradients of the probabilities", chosen),
        (scatter, Phase.BACKWARD, "gradients of the inputs", tokens),
    ]
