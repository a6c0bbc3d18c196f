"""Memory traffic of one layer's kernels in one micro batch, without matrix products and fused attention.

Kernels are Megatron's fused ones. The bytes that each kernel reads and writes of its operands are counted; caches are
not. A pair of numbers is always forward and backward.
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


_PERMUTE_PASSES = 4
"""Passes over the tokens' copies: to the experts' order and back, each read and written."""
_SORT_PASSES = 4
"""Further passes where a rank receives its experts' tokens rank by rank, orders them, and orders them back
(`token_dispatcher.py: sort_chunks_by_idxs`)."""
_EXPERT_BIAS_PASSES, _FP32_EXPERT_BIAS_PASSES = (6, 8), (14, 20)
"""Further passes, forward and backward, for a bias of the experts' second product. Kernels of PyTorch multiply the bias
with probabilities, add it and concatenate it (`experts.py: TEGroupedMLP._apply_bias`); backward multiplies and sums for
the gradients of both and joins those of the experts. Probabilities in fp32 make all of it fp32, and cast the result and
its gradient."""
_CLAMP_PASSES = 8, 15
"""Further passes, forward and backward, of a gated activation whose halves are clamped and joined before its fused
kernel (`fused_bias_geglu.py: weighted_bias_quick_geglu_impl`): 4 and 4; backward compares, masks (one half by both
limits) and joins: 4, 7 and 4."""
_LONGEST_FUSED_SOFTMAX = 4096
_FUSED_SOFTMAX_ROWS = 4
_TORCH_SOFTMAX_BYTES = 33, 34
"""Further bytes per score, forward and backward: casts, scale, mask and softmax in fp32, each read and written."""
_MTP_JOIN_PASSES = 6
"""Passes per depth of multi-token prediction, beside its norms: hidden states and embeddings are joined to one tensor,
twice as wide, and the outputs of all depths to another (`torch.cat`), each read and written."""
_EAGER_ACTIVATION_PASSES = 2, 7
"""Further passes, forward and backward, of a squared ReLU in PyTorch's own kernels. The ReLU and the power each read
and write (4 for 2). Backward copies and doubles the power's input, multiplies it with the gradient and masks the
product (10 for 3; `derivatives.yaml: pow, relu`)."""
_TORCH_NORM_FACTORS = 1.9, 3.5
"""Time of PyTorch's LayerNorm, forward and backward, over that of a fused norm's bytes (measured). Its backward is two
kernels that read input and gradient each, for the input's gradient and the weights'
(`aten/src/ATen/native/cuda/layer_norm_kernel.cu`, RMSNorm's too)."""
_TORCH_ROTARY_FACTORS = 6, 7
"""Traffic of PyTorch's rotary positions, forward and backward, over that of a fused kernel: products with cosine and
sine, halves negated and joined, the sum, and columns without positions joined to it, also where there are none
(`rope_utils.py: _apply_rotary_pos_emb_bshd`: 12 passes; 14 of its gradients, two of which are added)."""


class LayerBytes(NamedTuple):
    """Memory traffic of a layer in one micro batch, in bytes."""

    forward: int
    backward: int
    recompute: int
    """The part of forward that backward repeats; `backward` does not include it."""


class _Part(NamedTuple):
    """Memory traffic of some of a layer's kernels, and the modules whose recomputation repeats them."""

    forward: float
    backward: float
    modules: tuple[str, ...] = ()
    """If empty, only the recomputation of the full layer repeats the kernels."""


def layer_bytes(spec: RunSpec, rate: DeviceRates) -> LayerBytes:
    """Return the bytes that a layer reads and writes in the device's memory for one micro batch.

    Three kinds of traffic are not included: the scores of unfused attention (`scores_bytes`), casts to fewer bits, and
    the traffic that context parallelism adds (`context_bytes`).
    """
    factor = rate.elementwise
    elementwise = _list_elementwise_parts(spec, rate)
    parts = [
        *(
            _Part(factor * part.forward, factor * part.backward, part.modules)
            for part in elementwise
        ),
        _Part(*_routing_bytes(spec, rate), ("moe",)),
        _Part(*_scan_bytes(spec)),
    ]
    return LayerBytes(
        int(sum(part.forward for part in parts)),
        int(sum(part.backward for part in parts)),
        int(sum(part.forward for part in parts if spec.recompute.recomputes(*part.modules))),
    )


def _routing_bytes(spec: RunSpec, rate: DeviceRates) -> tuple[int, int]:
    """Return the bytes that routing moves in one layer per micro batch, in forward and in backward.

    Routing computes the router's scores, and permutes tokens to their experts and back. With some kernels it also sorts
    tokens by local expert and adds the experts' biases. Both numbers are 0 for a dense model.
    """
    shape, execution = spec.shape, rate.execution
    if not shape.experts:
        return 0, 0
    rank_tokens = spec.micro_batch_tokens // spec.sequence_shards
    hidden = shape.latent_experts or shape.hidden
    copy_bytes = rank_tokens * shape.experts_per_token * hidden * spec.element_bytes
    score_bytes = 6 * 4 * rank_tokens * shape.experts

    is_gathered = spec.token_dispatcher is TokenDispatcher.ALL_GATHER
    permuted_ratio = spec.expert_receive_ratio if is_gathered else spec.expert_send_ratio
    permute_passes = _PERMUTE_PASSES * permuted_ratio
    has_several_local_experts = shape.experts > spec.parallelism.expert
    is_sorted = has_several_local_experts and not execution.deduplicated
    sort_passes = _SORT_PASSES if is_sorted else 0

    total_bytes = []
    for bias_passes in _expert_bias_passes(spec, rate):
        received_passes = (sort_passes + bias_passes) * spec.expert_receive_ratio
        total_bytes.append(round(copy_bytes * (permute_passes + received_passes)) + score_bytes)
    forward_bytes, backward_bytes = total_bytes
    return forward_bytes, backward_bytes


def _expert_bias_passes(spec: RunSpec, rate: DeviceRates) -> tuple[int, int]:
    """Return how often the experts' biases move all received tokens, in the forward and in the backward pass."""
    execution = rate.execution
    if not spec.shape.bias or execution.fused_experts:
        return 0, 0
    has_fp32_probabilities = execution.deduplicated or execution.wide_probabilities
    return _FP32_EXPERT_BIAS_PASSES if has_fp32_probabilities else _EXPERT_BIAS_PASSES


def softmax_is_fused(spec: RunSpec) -> bool:
    """Return True if a fused kernel computes the softmax of attention, or if none is needed.

    Megatron's fused kernel for unfused attention needs a number of heads times samples that is divisible by four, and
    at most 4,096 keys (`fused_softmax.py: is_kernel_available`). The result is also True for fused attention. It is
    True for fp32 too, because the softmax then has no casts.
    """
    if spec.fused_attention or spec.dtype == "fp32":
        return True
    rows = spec.shape.heads // spec.parallelism.tensor * spec.batch.micro_batch_size
    is_short = spec.shape.seq_length <= _LONGEST_FUSED_SOFTMAX
    return is_short and rows % _FUSED_SOFTMAX_ROWS == 0


def scores_bytes(spec: RunSpec) -> tuple[int, int]:
    """Return the bytes that unfused attention moves for its scores in one layer, in forward and in backward.

    Both numbers are for one micro batch. They are 0 for fused attention.
    """
    if spec.fused_attention:
        return 0, 0
    shape, element = spec.shape, spec.element_bytes
    heads = shape.heads // spec.parallelism.tensor
    num_scores = heads * spec.micro_batch_tokens * shape.seq_length
    dropout = 2 * element + 1 if spec.dropout else 0
    softmax_forward, softmax_backward = (0, 0) if softmax_is_fused(spec) else _TORCH_SOFTMAX_BYTES
    forward = 4 * element + dropout + softmax_forward
    backward = 6 * element + dropout + softmax_backward
    return forward * num_scores, backward * num_scores


def _uses_torch_kernel(spec: RunSpec, rate: DeviceRates, patch: str) -> bool:
    """Return True if PyTorch's own kernels do what `patch`, one of the kit's, would fuse."""
    return rate.execution.torch_kernels and patch not in spec.fused


def _list_elementwise_parts(spec: RunSpec, rate: DeviceRates) -> Iterator[_Part]:
    """Yield the memory traffic of norms, dropouts, residuals, activations, biases and rotary positions.

    The block that joins the inputs of multi-token prediction has only the traffic of its norms and of the joining.
    """
    shape, element = spec.shape, spec.element_bytes
    hidden = spec.micro_batch_tokens * shape.hidden // spec.sequence_shards
    yield from _list_norm_parts(spec, rate, hidden)
    if shape.blocks == MTP:
        backward_passes = _MTP_JOIN_PASSES + 3 * shape.norms_per_layer
        yield _Part(_MTP_JOIN_PASSES * element * hidden, backward_passes * element * hidden)
        return
    mask_forward, mask_backward = (2, 10) if spec.dropout else (0, 0)
    residual = 3 * element + mask_forward / 2
    backward_hidden = 12 * element + mask_backward + (2 * element if shape.bias else 0)
    yield _Part(
        shape.residual_additions * residual * hidden,
        shape.residual_additions * backward_hidden / 2 * hidden,
    )
    yield from _list_activation_parts(spec, rate)
    if shape.bias:
        # The gradient of the projections' bias is a sum. PyTorch also adds the bias itself in a pass of its own.
        adds_bias = _uses_torch_kernel(spec, rate, "bias_gemm") and not shape.latent
        projected = element * spec.micro_batch_tokens / spec.parallelism.tensor
        projected = projected * (shape.heads + 2 * shape.query_groups) * shape.head_width
        yield _Part((2 if adds_bias else 0) * projected, projected)
    yield _Part(*_attention_input_bytes(spec, rate), ("mla_up_proj",) if shape.latent else ())


def _list_norm_parts(spec: RunSpec, rate: DeviceRates, hidden: int) -> Iterator[_Part]:
    """Yield the traffic of a layer's norms over `hidden` elements.

    The traffic of fused norms in backward is counted with the residuals. PyTorch's norms move more bytes in backward,
    and only these additional bytes are yielded here.
    """
    shape, element = spec.shape, spec.element_bytes
    is_torch_norm = _uses_torch_kernel(spec, rate, "norm")
    forward_factor, backward_factor = _TORCH_NORM_FACTORS if is_torch_norm else (1.0, 1.0)
    further_backward = 3 * (backward_factor - 1) * element * hidden
    for modules in norm_modules(spec):
        yield _Part(2 * forward_factor * element * hidden, 0, modules)
    yield _Part(0, shape.norms_per_layer * further_backward)


def _list_activation_parts(spec: RunSpec, rate: DeviceRates) -> Iterator[_Part]:
    """Yield the memory traffic of activation functions: of the MLP, or of the routed and the shared experts.

    Fused experts compute their activations inside the matrix products, which adds no bytes.
    """
    shape, element = spec.shape, spec.element_bytes
    column_bytes = element * spec.micro_batch_tokens / spec.parallelism.tensor
    gate = 2 if shape.gated else 1
    sums_bias_gradient = shape.bias and (shape.gated or "bias_gelu" not in spec.fused)
    forward, backward = gate + 1, 2 * gate + 1 + (gate if sums_bias_gradient else 0)
    if rate.execution.eager_activation:
        further_forward, further_backward = _EAGER_ACTIVATION_PASSES
        forward, backward = forward + further_forward, backward + further_backward
    columns_by_modules: list[tuple[int, tuple[str, ...]]] = [(shape.ffn_hidden, ("mlp",))]
    clamped_columns = 0
    if shape.experts:
        is_fused = rate.execution.fused_experts
        routed_per_token = 0 if is_fused else shape.experts_per_token * shape.expert_ffn_hidden
        routed = round(routed_per_token * spec.expert_receive_ratio)
        columns_by_modules = [
            (routed, ("moe", "moe_act")),
            (shape.shared_expert_ffn, ("moe", "shared_experts")),
        ]
        clamped_columns = routed if shape.clamps_activations else 0
    clamp_forward, clamp_backward = _CLAMP_PASSES
    yield _Part(
        column_bytes * clamped_columns * clamp_forward,
        column_bytes * clamped_columns * clamp_backward,
        ("moe", "moe_act"),
    )
    for columns, modules in columns_by_modules:
        yield _Part(column_bytes * columns * forward, column_bytes * columns * backward, modules)


def _attention_input_bytes(spec: RunSpec, rate: DeviceRates) -> tuple[int, int]:
    """Return the bytes that a rank moves between a layer's projections and attention, in forward and in backward.

    The bytes are for one micro batch. Two steps move bytes: rotary positions, and the split of one tensor into queries,
    keys and values, whose gradients are joined in backward (`attention.py: get_query_key_value_tensors`). Both numbers
    are 0 for a layer without attention. They are also 0 with Transformer Engine if the model has learned positions and
    as many query groups as heads, because attention then takes queries, keys and values as one tensor.
    """
    shape = spec.shape
    is_rotary = not shape.positions
    is_grouped = shape.query_groups < shape.heads
    has_attention = shape.heads and shape.blocks != MAMBA
    if not has_attention or not (is_rotary or is_grouped or rate.execution.torch_kernels):
        return 0, 0
    column_bytes = 2 * spec.element_bytes * spec.micro_batch_tokens // spec.parallelism.tensor
    if shape.latent:
        # Queries rotate in place. Keys and values come out of one tensor, and each head's key gets the same rotary
        # part.
        latent = shape.latent
        rotated = latent.rotary_width + latent.rotary_width // 2
        width = rotated + latent.head_width + latent.value_width
        return column_bytes * shape.heads * width, column_bytes * shape.heads * width
    queries, keys = shape.heads * shape.head_width, shape.query_groups * shape.head_width
    rotated = column_bytes * (queries + keys) if is_rotary else 0
    taken = column_bytes * queries if is_grouped else 0
    forward, backward = _TORCH_ROTARY_FACTORS if rate.execution.unfused_rotary else (1, 1)
    return forward * rotated + taken, backward * rotated + column_bytes * (queries + 2 * keys)


def context_bytes(spec: RunSpec) -> tuple[int, int]:
    """Return the bytes that context parallelism adds to the memory traffic of attention, in forward and in backward.

    Both numbers are for one layer and micro batch. They are 0 without context parallelism. They depend on the
    algorithm:

    - Ring: K and V are copied into one buffer. The result of the first step is read and written. A further step
      computes half of the queries or half of the keys. To add its result to the sum, three quarters of a full result
      are read twice and written once.
    - All-gather: the gathered K and V are put into order, once in forward and twice in backward.
    - All-to-all: Q, K, V and the output are reordered before and after they are sent.
    """
    parallelism, shape = spec.parallelism, spec.shape
    ranks = parallelism.context
    if ranks == 1 or not spec.cp_comm_type:
        return 0, 0
    column_bytes = spec.element_bytes * spec.micro_batch_tokens
    queries = column_bytes * shape.heads * shape.head_width // parallelism.tensor
    keys = 2 * column_bytes * shape.query_groups * shape.head_width // parallelism.tensor
    if spec.cp_comm_type == "all_gather":
        return 2 * ranks * keys, 4 * ranks * keys
    if spec.cp_comm_type == "a2a":
        return 4 * (2 * queries + keys), 4 * (2 * queries + keys)
    merging = 2 * 4 + 3 * 3 * (ranks - 1)
    return 2 * keys + merging * queries // 4, merging * (queries + keys) // 4


def _scan_bytes(spec: RunSpec) -> tuple[int, int]:
    """Return the bytes that a Mamba-2 mixer moves outside its matrix products, in forward and in backward.

    Both numbers are 0 for other layers. The bytes are those of the convolution, of the fp32 states between the scan's
    kernels, of the operands of these kernels, and of the gated norm. Backward recomputes the convolution and the
    states, and moves twice as much for their gradients. The kernels of the scan are those of mamba_ssm
    (`ssd_combined.py`). They move a tensor of the mixer's width four times in forward and twelve times in backward. The
    gated norm moves such a tensor three times in forward and six times in backward.
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
