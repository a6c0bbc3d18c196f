"""Bytes that one layer's kernels beside matrix products and fused attention move in one micro batch.

Kernels are Megatron's fused ones; what each reads and writes of its operands is counted, caches are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parakit.config.model import MAMBA, MTP
from parakit.config.run import RunSpec, TokenDispatcher
from parakit.costs import norm_modules
from parakit.planner.time.rates import DeviceRates

CHUNK = 128
"""Tokens of a Mamba-2 mixer's scan that are one matrix (`mamba_mixer.py: chunk_size`)."""


_PERMUTED = 4
"""Passes over the tokens' copies: to the experts' order and back, each read and written."""
_SORTED = 4
"""More where a rank gets its experts' tokens rank by rank and orders them, and back
(`token_dispatcher.py: sort_chunks_by_idxs`)."""
_BIASED, _WIDELY_BIASED = (6, 8), (14, 20)
"""More, forward and backward, for a bias of the second product, which is multiplied with probabilities,
added and concatenated by kernels of PyTorch's (`experts.py: TEGroupedMLP._apply_bias`); backward
multiplies and sums for the gradients of both and joins those of the experts. Probabilities in fp32 make
all of it fp32, and cast the result and its gradient."""
_CLAMPED = 8, 15
"""More, forward and backward, of a gated activation whose halves are clamped and joined before its fused
kernel (`fused_bias_geglu.py: weighted_bias_quick_geglu_impl`): 4 and 4; backward compares, masks (one
half by both limits) and joins: 4, 7 and 4."""
_LONGEST_FUSED_SOFTMAX = 4096
_FUSED_SOFTMAX_ROWS = 4
_TORCH_SOFTMAX_BYTES = 33, 34
"""More a score, forward and backward: casts, scale, mask and softmax in fp32, each read and written."""
_JOINED = 6
"""Passes of a depth of multi-token prediction beside its norms: hidden states and embeddings are joined
to one tensor, twice as wide, and all depths' outputs to another (`torch.cat`), each read and written."""
_EAGER_ACTIVATION = 2, 7
"""More passes, forward and backward, of a squared ReLU in PyTorch's own kernels: the ReLU and the power
each read and write (4 for 2); backward copies and doubles the power's input, multiplies it with the
gradient and masks that (10 for 3; `derivatives.yaml: pow, relu`)."""
_TORCH_NORM = 1.9, 3.5
"""Times, forward and backward, that PyTorch's LayerNorm takes for a fused one's bytes (measured). Its
backward is two kernels that read input and gradient each, for the input's gradient and the weights'
(`aten/src/ATen/native/cuda/layer_norm_kernel.cu`, RMSNorm's too)."""
_TORCH_ROTARY = 6, 7
"""Times of a fused kernel's reading and writing, forward and backward: products with cosine and sine,
halves negated and joined, the sum, and columns without positions joined to it, also where there are none
(`rope_utils.py: _apply_rotary_pos_emb_bshd`: 12 passes; 14 of its gradients, two of which are added)."""


class LayerBytes(NamedTuple):
    """Of a layer and micro batch; `again` is what of forward's backward repeats."""

    forward: int
    backward: int
    again: int


class _Part(NamedTuple):
    """Bytes of some of a layer's kernels, and the modules with which they are computed again."""

    forward: float
    backward: float
    modules: tuple[str, ...] = ()


def layer_bytes(spec: RunSpec, rate: DeviceRates) -> LayerBytes:
    """Without unfused attention's scores, casts to fewer bits, and `context_bytes`."""
    times = rate.elementwise
    portable = _elementwise_parts(spec, rate)
    parts = [
        *(_Part(times * part.forward, times * part.backward, part.modules) for part in portable),
        _Part(*_routed_bytes(spec, rate), ("moe",)),
        _Part(*_scan_bytes(spec)),
    ]
    return LayerBytes(
        int(sum(part.forward for part in parts)),
        int(sum(part.backward for part in parts)),
        int(sum(part.forward for part in parts if spec.recompute.recomputes(*part.modules))),
    )


def _routed_bytes(spec: RunSpec, rate: DeviceRates) -> tuple[int, int]:
    """Memory traffic of permuting tokens to their experts and back, and of the router's scores."""
    shape = spec.shape
    if not shape.experts:
        return 0, 0
    own = spec.micro_batch_tokens // spec.sequence_shards
    hidden = shape.latent_experts or shape.hidden
    copies = own * shape.experts_per_token * hidden * spec.element_bytes
    gathered = spec.token_dispatcher is TokenDispatcher.ALL_GATHER
    permuted = spec.expert_receive_ratio if gathered else spec.expert_send_ratio
    sorts = not rate.execution.deduplicated and shape.experts > spec.parallelism.expert
    wide = rate.execution.deduplicated or rate.execution.wide_probabilities
    adds = shape.bias and not rate.execution.fused_experts
    scores = 6 * 4 * own * shape.experts
    forward, backward = (
        round(copies * (_PERMUTED * permuted + received * spec.expert_receive_ratio)) + scores
        for received in (
            _SORTED * sorts + more * adds for more in (_WIDELY_BIASED if wide else _BIASED)
        )
    )
    return forward, backward


def softmax_is_fused(spec: RunSpec) -> bool:
    """Whether unfused attention has one kernel for scale, mask and softmax.

    Megatron's takes four rows of heads times samples at once, and keys up to 4,096
    (`fused_softmax.py: is_kernel_available`). True where attention itself is fused, and in fp32, whose
    softmax has no casts.
    """
    if spec.fused_attention or spec.dtype == "fp32":
        return True
    rows = spec.shape.heads // spec.parallelism.tensor * spec.batch.micro_batch_size
    short = spec.shape.seq_length <= _LONGEST_FUSED_SOFTMAX
    return short and rows % _FUSED_SOFTMAX_ROWS == 0


def scores_bytes(spec: RunSpec) -> tuple[int, int]:
    """Unfused attention writes its scores and reads them back, four times over."""
    if spec.fused_attention:
        return 0, 0
    shape, element = spec.shape, spec.element_bytes
    heads = shape.heads // spec.parallelism.tensor
    scores = heads * spec.micro_batch_tokens * shape.seq_length
    dropout = 2 * element + 1 if spec.dropout else 0
    more = (0, 0) if softmax_is_fused(spec) else _TORCH_SOFTMAX_BYTES
    forward, backward = 4 * element + dropout + more[0], 6 * element + dropout + more[1]
    return forward * scores, backward * scores


def _is_torchs(spec: RunSpec, rate: DeviceRates, patch: str) -> bool:
    """Whether PyTorch's own kernels do what a patch of the kit would fuse."""
    return rate.execution.torch_kernels and patch not in spec.fused


def _elementwise_parts(spec: RunSpec, rate: DeviceRates) -> Iterator[_Part]:
    """Memory traffic of norms, dropouts, residuals, activations and bias gradients; experts' activations
    and biases may be parts of their products."""
    shape, element = spec.shape, spec.element_bytes
    hidden = spec.micro_batch_tokens * shape.hidden // spec.sequence_shards
    forward_masks, backward_masks = (2, 10) if spec.dropout else (0, 0)
    again_forward, again_backward = _TORCH_NORM if _is_torchs(spec, rate, "norm") else (1.0, 1.0)
    more = 3 * (again_backward - 1) * element * hidden  # A fused one's three passes are below.
    for modules in norm_modules(spec):
        yield _Part(2 * again_forward * element * hidden, 0, modules)
    yield _Part(0, shape.norms_per_layer * more)
    if shape.blocks == MTP:
        yield _Part(
            _JOINED * element * hidden, (_JOINED + 3 * shape.norms_per_layer) * element * hidden
        )
        return
    residual = 3 * element + forward_masks / 2
    backward_hidden = 12 * element + backward_masks + (2 * element if shape.bias else 0)
    yield _Part(
        shape.residual_additions * residual * hidden,
        shape.residual_additions * backward_hidden / 2 * hidden,
    )
    wide = element * spec.micro_batch_tokens / spec.parallelism.tensor
    gate = 2 if shape.gated else 1
    summed = shape.bias and (shape.gated or "bias_gelu" not in spec.fused)
    forward, backward = gate + 1, 2 * gate + 1 + (gate if summed else 0)
    if rate.execution.eager_activation:
        forward, backward = forward + _EAGER_ACTIVATION[0], backward + _EAGER_ACTIVATION[1]
    # Columns of activations for each token, and the modules that they are computed again with.
    activated: list[tuple[int, tuple[str, ...]]] = [(shape.ffn_hidden, ("mlp",))]
    clamped = 0
    if shape.experts:
        fused = rate.execution.fused_experts
        routed = 0 if fused else shape.experts_per_token * shape.expert_ffn_hidden
        routed, shared = round(routed * spec.expert_receive_ratio), shape.shared_expert_ffn
        activated = [(routed, ("moe", "moe_act")), (shared, ("moe", "shared_experts"))]
        clamped = routed if shape.clamps_activations else 0
    yield _Part(wide * clamped * _CLAMPED[0], wide * clamped * _CLAMPED[1], ("moe", "moe_act"))
    for ffn, modules in activated:
        yield _Part(wide * ffn * forward, wide * ffn * backward, modules)
    if shape.bias:
        # Its gradient is a sum; PyTorch adds the bias itself in a pass of its own, too.
        added = 2 if _is_torchs(spec, rate, "bias_gemm") and not shape.latent else 0
        projected = wide * (shape.heads + 2 * shape.query_groups) * shape.head_width
        yield _Part(added * projected, projected)
    yield _Part(*_laid_out_bytes(spec, rate), ("mla_up_proj",) if shape.latent else ())


def _laid_out_bytes(spec: RunSpec, rate: DeviceRates) -> tuple[int, int]:
    """Memory traffic between the projections and attention: rotary positions, and queries, keys and
    values taken out of one tensor and their gradients put into one (`attention.py:
    get_query_key_value_tensors`; learnt positions and as many groups as heads need neither with
    Transformer Engine, whose attention takes them as one tensor)."""
    shape, rotary = spec.shape, not spec.shape.positions
    grouped, attends = shape.query_groups < shape.heads, shape.heads and shape.blocks != MAMBA
    if not attends or not (rotary or grouped or rate.execution.torch_kernels):
        return 0, 0
    moved = 2 * spec.element_bytes * spec.micro_batch_tokens // spec.parallelism.tensor
    if latent := shape.latent:
        # Queries in place, keys and values out of one tensor, each head's key with the same rotary part.
        rotated = latent.rotary_width + latent.rotary_width // 2
        width = rotated + latent.head_width + latent.value_width
        return moved * shape.heads * width, moved * shape.heads * width
    queries, keys = shape.heads * shape.head_width, shape.query_groups * shape.head_width
    turned = moved * (queries + keys) if rotary else 0
    taken = moved * queries if grouped else 0
    forward, backward = _TORCH_ROTARY if rate.execution.unfused_rotary else (1, 1)
    return forward * turned + taken, backward * turned + moved * (queries + 2 * keys)


def context_bytes(spec: RunSpec) -> tuple[int, int]:
    """Memory traffic that context parallelism adds to attention, forward and backward.

    Ring: K and V are packed, the first step's result is read and written; of each further step's,
    which works on half of the queries or half of the keys, three quarters are read, added to and
    written. Gathered: K and V are put in order as many times as they are gathered. All-to-all:
    every tensor is reordered before and after its exchange.
    """
    parallelism, shape = spec.parallelism, spec.shape
    ranks = parallelism.context
    if ranks == 1 or not spec.cp_comm_type:
        return 0, 0
    element = spec.element_bytes * spec.micro_batch_tokens
    queries = element * shape.heads * shape.head_width // parallelism.tensor
    keys = 2 * element * shape.query_groups * shape.head_width // parallelism.tensor
    if spec.cp_comm_type == "all_gather":
        return 2 * ranks * keys, 4 * ranks * keys
    if spec.cp_comm_type == "a2a":
        return 4 * (2 * queries + keys), 4 * (2 * queries + keys)
    merging = 2 * 4 + 3 * 3 * (ranks - 1)
    return 2 * keys + merging * queries // 4, merging * (queries + keys) // 4


def _scan_bytes(spec: RunSpec) -> tuple[int, int]:
    """Memory traffic of a Mamba-2 mixer beside its products: the convolution, states in fp32 between the
    scan's kernels, what these read and write themselves, the gated norm. Backward computes the first two
    again and moves twice as much.

    Of the scan's kernels in mamba_ssm (`ssd_combined.py`), forward two read the inputs, one the gate,
    and one writes; backward's read inputs, gates and gradients nine times and write three.
    """
    mamba, tensor = spec.shape.mamba, spec.parallelism.tensor
    if spec.shape.blocks != MAMBA or mamba is None:
        return 0, 0
    element, tokens = spec.element_bytes, spec.micro_batch_tokens // tensor
    convolution = 2 * element * tokens * mamba.convolved_channels
    states = 4 * 4 * tokens * mamba.width * mamba.state // CHUNK
    scanned = element * tokens * mamba.width
    forward = convolution + states + (4 + 3) * scanned
    return forward, 3 * (convolution + states) + (12 + 6) * scanned
