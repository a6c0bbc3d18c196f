"""Buffers of DeepEP and HybridEP on a device, outside PyTorch's allocator.

Tokens pass through the buffers on the way to experts on other ranks. The buffers are allocated once
and never freed.
"""

from __future__ import annotations

from collections.abc import Mapping

from parakit.config.groups import Group, group_size
from parakit.config.model import round_up
from parakit.config.run import RunSpec, TokenDispatcher
from parakit.formatting.units import MIB

DEEP_EP_NVLINK_PEERS = 8
"""Ranks that DeepEP reaches over NVLink (`csrc/kernels/configs.cuh` of v1.2.1)."""
_CHANNELS = 10
"""Half of the streaming multiprocessors that DeepEP uses (`--moe-deepep-num-sms`, 20)."""
_WORKSPACE_BYTES = 32 * MIB
_SOURCE, _SCORES, _SLOT = 8, 128 * (8 + 4) + 128 * 4, 16
"""Bytes per token in a DeepEP buffer besides its hidden state: its origin; ids and probabilities of
at most 128 experts and at most 128 scales; and 16 more bytes between nodes.
"""
_HELD: Mapping[int, tuple[int, int]] = {
    **dict.fromkeys((2, 4, 8), (256, 0)),
    **{16: (288, 140), 24: (288, 128), 32: (288, 128), 64: (288, 140)},
    **{128: (560, 132), 144: (720, 132), 160: (720, 132)},
}
"""Tokens that a channel buffers per peer, over NVLink and between nodes, by number of ranks.

Each number is the larger of dispatch's and combine's, between nodes rounded up to a multiple of the
tokens sent at once (`deep_ep/buffer.py: get_dispatch_config, get_combine_config`). DeepEP supports
no other number of ranks.
"""


def dispatcher_bytes(spec: RunSpec) -> int:
    """Return the bytes of the buffers that the token dispatcher holds on a rank.

    Only DeepEP and HybridEP have such buffers. With other dispatchers, for dense models, and if one rank has all
    experts, the result is 0.
    """
    ranks = group_size(spec.parallelism, Group.TENSOR_EXPERT) if spec.shape.experts else 1
    if ranks == 1:
        return 0
    if spec.token_dispatcher is TokenDispatcher.DEEP_EP:
        return _deep_ep_bytes(spec, ranks)
    is_hybrid = spec.token_dispatcher is TokenDispatcher.HYBRID_EP
    return _hybrid_ep_bytes(spec, ranks) if is_hybrid else 0


def supports_deep_ep(spec: RunSpec) -> bool:
    """Return True if DeepEP can send a run's tokens: it knows the number of ranks that share the experts."""
    return bool(spec.shape.experts) and group_size(spec.parallelism, Group.TENSOR_EXPERT) in _HELD


def _hidden(spec: RunSpec) -> int:
    """Return the width of a routed token."""
    return spec.shape.latent_experts or spec.shape.hidden


def _deep_ep_bytes(spec: RunSpec, ranks: int) -> int:
    """Return the bytes of the buffers that Megatron requests from DeepEP.

    Memory that NVSHMEM uses itself is not counted. The result is 0 for a number of ranks that DeepEP does not
    support.

    Source: `fused_a2a.py: get_buffer`, and DeepEP v1.2.1 `csrc/config.hpp:
    get_nvl_buffer_size_hint, get_rdma_buffer_size_hint`.
    """
    if ranks not in _HELD:
        return 0
    near, far = _HELD[ranks]
    nodes, peers = max(1, ranks // DEEP_EP_NVLINK_PEERS), min(ranks, DEEP_EP_NVLINK_PEERS)
    token = 2 * _hidden(spec) + _SOURCE + _SCORES
    inside = _CHANNELS * peers * (near * token + 4 * (2 * nodes + 3))
    if nodes == 1:
        return _WORKSPACE_BYTES + round_up(inside, 128)
    between = 2 * _CHANNELS * nodes * (far * (token + _SLOT) + 4 * (2 * DEEP_EP_NVLINK_PEERS + 2))
    return _WORKSPACE_BYTES + round_up(inside, 128) + round_up(between, 128)


def _hybrid_ep_bytes(spec: RunSpec, ranks: int) -> int:
    """Return the bytes of HybridEP's buffers within one NVLink domain.

    Buffers between domains are not counted. The buffers have room for all tokens of all ranks: for their hidden
    states, the probabilities of all experts, and scales. Dispatch and combine share the buffers of hidden states
    and probabilities (branch hybrid-ep of DeepEP at 94a9f8f, `csrc/hybrid_ep/buffer/intranode.cu`).
    """
    tokens = ranks * (spec.micro_batch_tokens // spec.sequence_shards)
    hidden = _hidden(spec)
    hidden_bytes = 2 * hidden
    probability_bytes = 4 * spec.shape.experts
    # FP8 has one scale per 128 elements of the hidden state.
    scale_bytes = 4 * (hidden // 128)
    return tokens * (hidden_bytes + probability_bytes + scale_bytes)
