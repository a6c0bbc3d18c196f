"""Calls that move tokens to their experts and back, by `--moe-token-dispatcher-type`.

`alltoall`: the router decides how many tokens a rank receives. On average a rank receives as many
as it sends, top-k copies of its own. So the payloads summed over the EP group are exact, and those
of one rank are means. If an imbalance is stated, payloads are those of the busiest rank. With a
padded capacity they are exact. `allgather`: every rank gets all tokens of its group, and all
payloads are exact. Probabilities are sent in the model's dtype (`--moe-router-dtype` is not
modelled).
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
"""Operation, phase, description, and payload of one call in bytes."""


def expert_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the calls over EP, and over the TP ranks that share each expert."""
    if len(spec.shape.blocks) > 1:
        for times, kind in spec.block_specs:
            yield from (
                call._replace(calls=times * call.calls) for call in expert_collectives(kind)
            )
        return
    if not spec.shape.experts:
        return
    if spec.shape.load_balancing:
        yield _auxiliary_loss_call(spec)
    if spec.token_dispatcher == TokenDispatcher.ALL_GATHER:
        yield from _layer_calls(spec, Group.TENSOR_EXPERT, _all_gather_rows(spec), _GATHERING)
        return
    if not spec.expert_load.pads_to_capacity:  # Else every rank knows them.
        yield from _layer_calls(
            spec, Group.TENSOR_EXPERT, [_token_counts(spec)], f"{_EXCHANGING}.preprocess"
        )
    chosen = routed_tokens(spec) * spec.element_bytes
    width = spec.shape.latent_experts or spec.shape.hidden
    tokens = _all_to_all_rows("tokens to their experts and back", chosen * width)
    probabilities = _all_to_all_rows("routing probabilities", chosen)
    yield from _layer_calls(spec, Group.EXPERT, tokens, _EXCHANGING, times=2)
    yield from _layer_calls(spec, Group.EXPERT, probabilities, _EXCHANGING)
    if spec.parallelism.effective_expert_tensor > 1:
        yield from _layer_calls(spec, Group.EXPERT_TENSOR, _expert_tensor_rows(spec), _EXCHANGING)


def routed_tokens(spec: RunSpec) -> int:
    """Return the token copies that a rank sends or receives per micro batch, whichever is more."""
    copies = spec.micro_batch_tokens // spec.sequence_shards * spec.shape.experts_per_token
    return round(copies * max(spec.expert_send_ratio, spec.expert_receive_ratio))


def _layer_calls(
    spec: RunSpec, group: Group, rows: list[_Row], source: str, times: int = 1
) -> Iterator[CollectiveCall]:
    """Yield one entry per row, with the number of its calls per iteration.

    Nothing is yielded for a group of one rank.

    Args:
        rows: Operation, phase, description and payload bytes of each call.
        times: Calls of each row per pass through a layer.
    """
    if group_size(spec.parallelism, group) == 1:
        return
    forwards, backwards = layer_passes(spec, "moe")
    for operation, phase, description, payload in rows:
        calls = times * (forwards if phase is Phase.FORWARD else backwards)
        yield collective(spec, group, operation, phase, description, calls, payload, source)


def _auxiliary_loss_call(spec: RunSpec) -> CollectiveCall:
    """Return the all-reduce of the token counts per expert, from which the auxiliary loss is computed.

    It sums over the ranks among which a sample is split (TP and CP). It happens once per layer and micro batch:
    in the recomputation if the layer is recomputed, else in forward.
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
    """Return the all-gather in which every rank reports its number of tokens per expert."""
    ranks = group_size(spec.parallelism, Group.TENSOR_EXPERT)
    payload = ranks * spec.shape.experts * _INT64
    return Operation.ALL_GATHER, Phase.FORWARD, "tokens for each expert", payload


def _all_to_all_rows(description: str, payload: int) -> list[_Row]:
    """Return the all-to-alls of a tensor in forward, and of its gradients in backward."""
    exchange = Operation.ALL_TO_ALL
    return [(exchange, phase, description, payload) for phase in (Phase.FORWARD, Phase.BACKWARD)]


def _all_gather_rows(spec: RunSpec) -> list[_Row]:
    """Return the calls of the all-gather dispatcher per layer and micro batch.

    Every rank of the ETP×EP group gathers all tokens of the group. A reduce-scatter sums the experts' outputs
    and returns each token to its rank.
    """
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


def _expert_tensor_rows(spec: RunSpec) -> list[_Row]:
    """Return the calls over ETP per layer and micro batch.

    The inputs of an expert are gathered, and its outputs are reduce-scattered. CPU ranks use all-to-alls of as
    many bytes in place of both. The reason is that gloo gathers and scatters only parts of equal size
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
