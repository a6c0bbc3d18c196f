"""What DeepEP and HybridEP hold of a device beside PyTorch's allocator: buffers that tokens pass through
on their way to experts on other ranks and back, made once and kept."""

from __future__ import annotations

from collections.abc import Mapping

from parakit.config.groups import Group, group_size
from parakit.config.model import round_up
from parakit.config.run import RunSpec, TokenDispatcher
from parakit.formatting.units import MIB

DEEP_EP_NVLINK_PEERS = 8
"""Ranks that DeepEP reaches over NVLink (`csrc/kernels/configs.cuh` of v1.2.1)."""
_CHANNELS = 10
"""Half of the processors that DeepEP takes (`--moe-deepep-num-sms`, 20)."""
_WORKSPACE_BYTES = 32 * MIB
_SOURCE, _SCORES, _SLOT = 8, 128 * (8 + 4) + 128 * 4, 16
"""Of a token in a DeepEP buffer beside its hidden state: where it comes from; ids and probabilities of
at most 128 experts and at most 128 scales; between nodes 16 bytes more."""
_HELD: Mapping[int, tuple[int, int]] = {
    **dict.fromkeys((2, 4, 8), (256, 0)),
    **{16: (288, 140), 24: (288, 128), 32: (288, 128), 64: (288, 140)},
    **{128: (560, 132), 144: (720, 132), 160: (720, 132)},
}
"""Tokens that a channel holds of each peer, over NVLink and between nodes, by ranks: the larger of what
dispatch and combine want, between nodes a multiple of what is sent at once (`deep_ep/buffer.py:
get_dispatch_config, get_combine_config`). DeepEP takes no other number of ranks."""


def dispatcher_bytes(spec: RunSpec) -> int:
    """Of a rank; 0 where tokens go through NCCL, or one rank has all experts."""
    ranks = group_size(spec.parallelism, Group.TENSOR_EXPERT) if spec.shape.experts else 1
    if ranks == 1:
        return 0
    if spec.token_dispatcher is TokenDispatcher.DEEP_EP:
        return _deep_ep_bytes(spec, ranks)
    is_hybrid = spec.token_dispatcher is TokenDispatcher.HYBRID_EP
    return _hybrid_ep_bytes(spec, ranks) if is_hybrid else 0


def _hidden(spec: RunSpec) -> int:
    return spec.shape.latent_experts or spec.shape.hidden


def _deep_ep_bytes(spec: RunSpec, ranks: int) -> int:
    """As Megatron asks for them (`fused_a2a.py: get_buffer`; `csrc/config.hpp` of DeepEP v1.2.1:
    `get_nvl_buffer_size_hint`, `get_rdma_buffer_size_hint`), without what NVSHMEM adds."""
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
    """Room for all tokens of all ranks, as if one rank's experts took them: hidden states, probabilities
    of all experts and scales, of which dispatch and combine share the first two (branch hybrid-ep of
    DeepEP at 94a9f8f, `csrc/hybrid_ep/buffer/intranode.cu`). It is of one NVLink domain; what several
    have between them is not counted."""
    tokens, hidden = ranks * (spec.micro_batch_tokens // spec.sequence_shards), _hidden(spec)
    return tokens * (2 * hidden + 4 * spec.shape.experts + 4 * (hidden // 128))
