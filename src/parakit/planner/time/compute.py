"""Seconds of arithmetic and of memory traffic on one rank, for one micro batch.

A matrix product takes its FLOPs at the achieved rate or its operands' bytes at the achieved memory
bandwidth, whichever is more; elementwise kernels take their bytes alone. Kernels are Megatron's fused
ones. Figures that say "measured" are of an H200 (../readings/README.md, "What an H200 showed").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

from parakit.config.model import MAMBA, MTP, LatentAttention, Mamba
from parakit.config.replacing import replace
from parakit.config.run import Fp8Recipe, RunSpec
from parakit.costs import (
    FP8_RECIPE_BYTES,
    bytes_per_parameter,
    held_parameters,
    logit_elements,
    offloaded_parameters,
    rank_tensors,
)
from parakit.planner.time.rates import DeviceRates
from parakit.planner.time.traffic import CHUNK, context_bytes, layer_bytes, scores_bytes

_BY_ROW = 1.4
"""Times that a pass takes which combines a row with a figure of its own (measured: 2.5 TB/s, where an
exponential reads and writes 4.2)."""
_FORWARD_CROSS_ENTROPY_BYTES = 4 + 4 + 8 * _BY_ROW + 8 + 4 + 8 * _BY_ROW
"""fp32 passes over the logits in `VocabParallelCrossEntropy`: copy out, maximum, subtract,
exponential, sum, divide."""
_BACKWARD_CROSS_ENTROPY_BYTES = 8 * _BY_ROW + 4
_FUSED_CROSS_ENTROPY_PASSES = 5
"""Over the half-precision logits themselves: read for the sum, read and overwritten by their gradient,
which backward reads and scales (`te_parallel_cross_entropy`, flash-attn's `xentropy`)."""
_ADAM_BYTES = 28
"""Read weight, both moments and gradient; write the first three."""
_TORCH_ADAM_BYTES = 80
"""PyTorch's own AdamW, a pass over all tensors for each operation (`torch/optim/adam.py:
_multi_tensor_adam`): decay 8, moments 12, 8 and 12, root and its two corrections 8 each, update 16."""
_NORM_AND_CLIP_BYTES = 4 + 8
_MOVED_BYTES = 4
"""Of an offloaded parameter, its gradient there and its weight back, each in fp32: copies that nothing
waits for convert on the device (`aten/src/ATen/native/cuda/Copy.cu`)."""
_DRAWING_SECONDS = 0.2e-9
"""Of a processor for a random number of a dropout in a kernel that torch.compile wrote (measured: bias,
dropout and addition of 42 million elements take 153 µs on 132 processors, where the bytes take 85). The
TorchScript kernels of the years before Hopper were not measured, and count none."""
_SPLITS = (1, 2, 4)
"""Parts of the inner dimension that are computed beside each other where a result has few tiles."""
_ACCUMULATED_BYTES = 8
"""A gradient in fp32, read and written (`--gradient-accumulation-fusion`)."""
_PRODUCT_KERNEL_SECONDS = 3e-6
"""Start and end of a product's kernel (measured)."""
_WIDE_HEAD, _WIDEST_HEAD = 128, 256
"""On Blackwell cuDNN trains heads up to 128 wide, keys of 192 with values of 128, and since 9.23 heads
of 256; others go to FlashAttention 2 (Transformer Engine 2.3 to 2.18, `fused_attn.cpp:
nvte_get_fused_attn_backend`; cudnn-frontend issue 242)."""
_NARROW_HEAD = 0.4
_SHORT_SEQUENCE = 720
"""Keys that a row of scores' start and end are worth (measured, of cuDNN and FlashAttention 2)."""
_DROPOUT_ATTENTION = 1.5
"""Each score's random number is drawn inside the kernel, again in backward (measured: 1,858 µs for
1,232 at a width of 80 and 1,024 keys)."""
_BACKWARD_ATTENTION = 2.5
"""Five products in backward for two in forward: the scores are computed again (arXiv:2205.14135)."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer, one micro batch; `again` is what of forward backward repeats."""

    forward_matmul: float
    matmul_recompute: float
    input_gradients: float
    weight_gradients: float
    forward_attention: float
    attention_recompute: float
    forward_memory: float
    memory_recompute: float
    backward_attention: float
    backward_memory: float

    @property
    def forward(self) -> float:
        """Of the first pass."""
        return self.forward_matmul + self.forward_attention + self.forward_memory

    @property
    def backward(self) -> float:
        """Of the second, with what it repeats of the first."""
        gradients = self.input_gradients + self.weight_gradients
        again = self.matmul_recompute + self.attention_recompute + self.memory_recompute
        return gradients + again + self.backward_attention + self.backward_memory


def layer_seconds(spec: RunSpec, rate: DeviceRates, frozen: bool = False) -> LayerSeconds:
    """Times of a layer of one kind; a frozen one computes no gradients of weights."""
    alone = _without_context(spec.without_cp_comm_type, rate, frozen)
    forward, backward = (moved / rate.bytes_per_second for moved in context_bytes(spec))
    if not backward:
        return alone
    again = forward if spec.recompute.recomputes("core_attn") else 0.0
    return replace(
        alone,
        forward_memory=alone.forward_memory + forward,
        memory_recompute=alone.memory_recompute + again,
        backward_memory=alone.backward_memory + backward,
    )


@lru_cache(maxsize=65536)
def _without_context(spec: RunSpec, rate: DeviceRates, frozen: bool) -> LayerSeconds:
    """Without what context parallelism adds to attention's memory traffic."""
    moved = layer_bytes(spec, rate)
    scores_forward, scores_backward = scores_bytes(spec)
    products = tuple(_products(spec))
    again = [spec.recompute.recomputes(*p.modules) for p in products]
    cast_forward, cast_backward = _cast_bytes(products, rate)
    cast_again, _ = _cast_bytes(compress(products, again), rate)
    attention, attention_backward = _attention_seconds(spec, rate)
    attention += scores_forward / rate.bytes_per_second
    # Random numbers of both hidden dropouts; backward reads the masks.
    numbers = (
        spec.micro_batch_tokens
        * spec.shape.hidden
        // spec.sequence_shards
        * spec.shape.residual_additions
    )
    drawn = spec.dropout and rate.compiled
    drawing = numbers * _DRAWING_SECONDS / rate.processors if drawn else 0.0
    trained = () if frozen else products
    added = sum(p.copies * p.inner * p.columns for p in trained) * _adding_seconds(spec, rate)
    fuses, element = not rate.execution.unfused_gradients, spec.element_bytes

    def seconds(p: _Product, rows: int, inner: int, columns: int, adds: bool = False) -> float:
        return product_seconds(rows, inner, columns, element, rate, p.copies, p.quantized, adds)

    forward = [seconds(p, p.rows, p.inner, p.columns) for p in products]
    return LayerSeconds(
        forward_matmul=sum(forward),
        matmul_recompute=sum(compress(forward, again)),
        input_gradients=sum(seconds(p, p.rows, p.columns, p.inner) for p in products),
        weight_gradients=sum(seconds(p, p.inner, p.rows, p.columns, fuses) for p in trained),
        forward_attention=attention,
        attention_recompute=attention if spec.recompute.recomputes("core_attn") else 0.0,
        forward_memory=(moved.forward + cast_forward) / rate.bytes_per_second + drawing,
        memory_recompute=(moved.again + cast_again) / rate.bytes_per_second
        + (drawing if spec.recompute.recomputes() else 0.0),
        backward_attention=attention_backward + scores_backward / rate.bytes_per_second,
        backward_memory=(moved.backward + cast_backward) / rate.bytes_per_second + added,
    )


def _adding_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Of an element of a weight's gradient, where no product adds it to those of other micro batches: it
    is read, and so are they, and written."""
    measured = rate.measured.gradient_seconds / rate.core_fraction
    moved = spec.element_bytes + 2 * bytes_per_parameter(spec).gradients
    return measured + (moved / rate.bytes_per_second if rate.execution.unfused_gradients else 0.0)


def embedding_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Look-up, positions, dropout, and the gradients' scatter: memory traffic."""
    elements = spec.micro_batch_tokens * spec.shape.hidden
    seconds = 10 * spec.element_bytes * elements / rate.bytes_per_second
    return seconds + _table_elements(spec) * rate.measured.gradient_seconds / rate.core_fraction


def head_seconds(spec: RunSpec, rate: DeviceRates) -> tuple[float, float]:
    """Output layer and loss of one micro batch: matrix products, and memory traffic.

    Both once more for each depth of tokens ahead, whose logits are read for the best guess as well
    (`multi_token_prediction.py: _compute_mtp_acceptance_counts`).
    """
    shape, tokens = spec.shape, spec.micro_batch_tokens
    width = shape.padded_vocabulary(spec.parallelism.tensor) // spec.parallelism.tensor
    hidden, element = shape.hidden, spec.element_bytes
    matmul = product_seconds(tokens, hidden, width, element, rate)
    matmul += product_seconds(tokens, width, hidden, element, rate)
    fuses = not rate.execution.unfused_gradients
    matmul += product_seconds(hidden, tokens, width, element, rate, accumulated=fuses)
    matmul *= shape.predicted_tokens
    passes: float = _FORWARD_CROSS_ENTROPY_BYTES + _BACKWARD_CROSS_ENTROPY_BYTES
    if spec.dtype != "fp32":
        passes += 2 * spec.element_bytes
    if spec.fused_loss or "cross_entropy" in spec.fused:
        passes = _FUSED_CROSS_ENTROPY_PASSES * spec.element_bytes
    logits = shape.predicted_tokens * logit_elements(spec)
    guessed = shape.total_mtp_layers * logit_elements(spec) * spec.element_bytes
    loss = (passes * logits + guessed) / rate.bytes_per_second
    each = rate.measured.logit_seconds
    if each is not None:
        matmul = 6 * tokens * hidden * width / rate.flops * shape.predicted_tokens
        loss = logits * each / rate.core_fraction
    added = shape.predicted_tokens * _table_elements(spec) * _adding_seconds(spec, rate)
    return matmul, loss + added


def _table_elements(spec: RunSpec) -> int:
    """Of the embedding's gradient, or the output layer's: made whole, and added to those before."""
    tensor = spec.parallelism.tensor
    return spec.shape.padded_vocabulary(tensor) * spec.shape.hidden // tensor


def optimizer_seconds(spec: RunSpec, rate: DeviceRates, pipeline_rank: int) -> float:
    """Adam, clipping, copies between precisions, and zeroing gradients: memory traffic.

    Raises:
        NoPeakError: What joins the device to a host that something is offloaded to is not known.
    """
    precision = bytes_per_parameter(spec)
    held, gradients = held_parameters(spec, pipeline_rank)
    measured = rate.measured
    if measured.parameter_seconds is not None:
        seconds = held * measured.parameter_seconds
        tensors = len(rank_tensors(spec, pipeline_rank))
        return (seconds + tensors * measured.tensor_seconds) / rate.core_fraction
    copies = precision.gradient_copies and precision.gradients + 4 + 8
    weights = precision.weights + 4 if precision.main_parameters else 0
    # Moments in fewer bytes are read and written in fewer.
    in_passes = rate.execution.torch_kernels and "adamw" not in spec.fused
    adam = (_TORCH_ADAM_BYTES if in_passes else _ADAM_BYTES) - 2 * (8 - precision.adam)
    a_parameter = adam + _NORM_AND_CLIP_BYTES + copies + weights
    offloaded = offloaded_parameters(spec, held)
    everywhere = held * _NORM_AND_CLIP_BYTES + gradients * precision.gradients
    beside = (held - offloaded) * (a_parameter - _NORM_AND_CLIP_BYTES) / rate.bytes_per_second
    if offloaded:
        # Beside the device's own update the host's, one kernel that is bound by its memory.
        # Gradients, update and weights follow one another, or each tensor's beside the others'
        # (`hybrid_optimizer.py: HybridDeviceOptimizer.step`).
        moved = offloaded * _MOVED_BYTES / rate.known_host.link_bytes_per_second
        update = offloaded * _ADAM_BYTES / rate.known_host.memory_bytes_per_second
        apart = rate.execution.overlap_offload
        beside = max(beside, moved, update) if apart else max(beside, update) + 2 * moved
    return everywhere / rate.bytes_per_second + beside


class _Product(NamedTuple):
    """`copies` products of rows×inner by inner×columns."""

    rows: int
    inner: int
    columns: int
    copies: int = 1
    quantized: bool = True
    normed: bool = False
    """Whether the norm before it can write its input quantised (`LayerNormLinear`)."""
    between: tuple[bool, bool] = (False, False)
    """Whether its input, and its output's gradient, stay between the two products of an expert."""
    modules: tuple[str, ...] = ()
    """With which it is computed again; in none, with its layer alone."""


@lru_cache(maxsize=65536)
def product_seconds(
    rows: int,
    inner: int,
    columns: int,
    element_bytes: int,
    rate: DeviceRates,
    copies: int = 1,
    quantized: bool = False,
    accumulated: bool = False,
) -> float:
    """A matrix product, or so many of one shape in one kernel.

    Tiles come in waves of one a processor, and the last wave takes as long as the others; each tile
    starts and ends with work that `fill` of its inner dimension would take. A device loads operands
    beside arithmetic, a core of a CPU does not.

    Args:
        rows: Of the first operand and the result.
        inner: Columns of the first operand.
        columns: Of the result.
        element_bytes: Of operands and result.
        rate: What the device reaches.
        copies: Products of this shape in one kernel.
        quantized: Whether the operands are in fewer bits, where the run has such.
        accumulated: Whether the result is added to gradients in fp32.
    """
    if not rows * inner * columns:
        return 0.0
    fewer = quantized and bool(rate.fp8_recipe)
    flops = rate.quantised_flops if fewer else rate.flops
    fill = rate.fill * (flops / rate.flops)
    at_once = 2 * rate.processors
    seconds = min(
        _tiled(rows, columns, copies * parts, rate) * at_once * (inner / parts + fill) / flops
        + (parts - 1) * 2 * 4 * copies * rows * columns / rate.bytes_per_second
        for parts in _SPLITS
    )
    width = FP8_RECIPE_BYTES[rate.fp8_recipe] if fewer else element_bytes
    written = _ACCUMULATED_BYTES if accumulated and rate.processors > 1 else element_bytes
    operands = width * (rows * inner + inner * columns) + written * rows * columns
    loading = copies * operands / rate.bytes_per_second
    if rate.processors == 1:
        return seconds + loading
    return max(seconds, loading) + _PRODUCT_KERNEL_SECONDS


def _tiled(rows: int, columns: int, copies: int, rate: DeviceRates) -> float:
    """Elements of the result that each processor computes; a core's tiles are too small to count."""
    if rate.processors == 1:
        return rows * columns * copies
    return min(
        [
            -(-copies * -(-rows // high) * -(-columns // wide) // rate.processors)
            * high
            * wide
            / share
            for high, wide, share in rate.tiles
        ]
    )


def _products(spec: RunSpec) -> Iterator[_Product]:
    """Forward products of one layer: attention's projections, and the MLP or the routed experts."""
    shape, tensor = spec.shape, spec.parallelism.tensor
    tokens, hidden = spec.micro_batch_tokens, shape.hidden
    if shape.blocks == MAMBA and shape.mamba:
        yield from _mamba_products(spec, shape.mamba)
        return
    if shape.blocks == MTP:
        yield _Product(tokens, 2 * hidden, hidden // tensor)
    if shape.latent:
        yield from _latent_products(spec, shape.latent)
    else:
        width = shape.heads * shape.head_width // tensor
        qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width // tensor
        yield _Product(tokens, hidden, qkv, normed=True)
        yield _Product(tokens, width, hidden)
    gate = 2 if shape.gated else 1
    dense = shape.shared_expert_ffn if shape.experts else shape.ffn_hidden
    if dense:
        inside = ("moe", "shared_experts") if shape.experts else ("mlp",)
        normed = not shape.experts
        yield _Product(tokens, hidden, dense // tensor * gate, normed=normed, modules=inside)
        yield _Product(tokens, dense // tensor, hidden, modules=inside)
    if not shape.experts:
        return
    inside = ("moe",)
    own = spec.micro_batch_tokens // spec.sequence_shards
    yield _Product(own, hidden, shape.experts, quantized=False, modules=inside)
    copies = shape.experts // spec.parallelism.expert
    split = spec.parallelism.effective_expert_tensor
    ffn = shape.expert_ffn_hidden // split
    routed = tokens * split // tensor * shape.experts_per_token // copies
    routed = max(1, round(routed * spec.expert_receive_ratio))
    if shape.latent_experts:
        yield _Product(own, hidden, shape.latent_experts, modules=inside)
        yield _Product(own, shape.latent_experts, hidden, modules=inside)
        hidden = shape.latent_experts
    first, second = (False, True), (True, False)
    yield _Product(routed, hidden, ffn * gate, copies, between=first, modules=inside)
    yield _Product(routed, ffn, hidden, copies, between=second, modules=inside)


def _mamba_products(spec: RunSpec, mamba: Mamba) -> Iterator[_Product]:
    """Projections, and the scan as matrix products (arXiv:2405.21060 section 6): in a chunk a group's
    scores and each head's sum by them, across chunks each head's state and what it adds."""
    tensor, tokens, hidden = spec.parallelism.tensor, spec.micro_batch_tokens, spec.shape.hidden
    yield _Product(tokens, hidden, mamba.projected_columns // tensor)
    yield _Product(tokens, mamba.width // tensor, hidden)
    chunks = -(-tokens // CHUNK)
    groups, heads = chunks * mamba.groups // tensor, chunks * mamba.heads // tensor
    state, width = mamba.state, mamba.head_width
    yield _Product(CHUNK, state, CHUNK, groups, quantized=False)
    yield _Product(CHUNK, CHUNK, width, heads, quantized=False)
    yield _Product(state, CHUNK, width, heads, quantized=False)
    yield _Product(CHUNK, state, width, heads, quantized=False)


def _latent_products(spec: RunSpec, latent: LatentAttention) -> Iterator[_Product]:
    """Down-projections of a rank's own tokens, up-projections of its heads."""
    hidden, tokens = spec.shape.hidden, spec.micro_batch_tokens
    heads, own = spec.shape.heads // spec.parallelism.tensor, tokens // spec.sequence_shards
    queries, up = heads * (latent.head_width + latent.rotary_width), ("mla_up_proj",)
    if latent.query_rank:
        yield _Product(own, hidden, latent.query_rank)
    yield _Product(tokens, latent.query_rank or hidden, queries, modules=up)
    yield _Product(own, hidden, latent.key_value_rank + latent.rotary_width)
    values = heads * latent.value_width
    keys_and_values = heads * latent.head_width + values
    yield _Product(tokens, latent.key_value_rank, keys_and_values, modules=up)
    yield _Product(tokens, values, hidden)


def _cast_bytes(products: Iterable[_Product], rate: DeviceRates) -> tuple[int, int]:
    """Memory traffic of quantising a layer's operands, forward and backward.

    An operand is read in two bytes and written twice, as it is and transposed for the weights'
    gradient (Transformer Engine, `cast_transpose`); one scale from the tensor's own maximum needs
    one more reading (`Float8CurrentScaling`) but after a norm, which computes it
    (TransformerEngine#2013), and NVFP4 has one beside those of its blocks (arXiv:2509.25149 §4.1).
    With a scale that is known before (`DelayedScaling`) a norm writes its output quantised, which is
    then only transposed. Fused experts cast what stays between their products in these.
    """
    fp8_recipe = rate.fp8_recipe
    if not fp8_recipe:
        return 0, 0
    read = 4 if fp8_recipe in (Fp8Recipe.TENSORWISE, Fp8Recipe.NVFP4) else 2
    written = FP8_RECIPE_BYTES[fp8_recipe]
    transposed = written if rate.transposes else 0.0
    width = read + written + transposed
    norms = {Fp8Recipe.DELAYED: 2 * transposed, Fp8Recipe.TENSORWISE: width - 2}
    of_norm = norms.get(fp8_recipe, width)
    inputs = outputs = 0.0
    for p in products:
        skipped = p.between if rate.execution.fused_experts else (False, False)
        if p.quantized and not skipped[0]:
            inputs += (of_norm if p.normed else width) * p.copies * p.rows * p.inner
        if p.quantized and not skipped[1]:
            outputs += width * p.copies * p.rows * p.columns
    return int(inputs), int(outputs)


def _attention_seconds(spec: RunSpec, rate: DeviceRates) -> tuple[float, float]:
    """Scores and their product with V, forward and backward; only fused attention skips what is masked.

    Fused, layers with a window compute that alone; the rate falls with the head's width, which the
    tensor cores' exponentials do not, and on short sequences; where the device's own kernels do not take
    the head, FlashAttention 2 does. Unfused, both are matrix products, one a head.
    """
    shape = spec.shape
    heads, length = shape.heads // spec.parallelism.tensor, shape.seq_length
    attended = shape.effective_attention_length(length)
    width = value = shape.head_width
    if shape.latent:
        width = shape.latent.head_width + shape.latent.rotary_width
        value = shape.latent.value_width
    if spec.fused_attention:
        flops = spec.micro_batch_tokens * attended * heads * (width + value)
        padded = -(-width // 32) * 32 / width
        narrow = min(1.0, padded * width / _WIDE_HEAD) ** _NARROW_HEAD if rate.narrow_heads else 1.0
        short = attended / (attended + _SHORT_SEQUENCE)
        drawn = _DROPOUT_ATTENTION if spec.dropout else 1.0
        own_kernels = rate.wide_heads or value <= _WIDE_HEAD or width == value == _WIDEST_HEAD
        reached = rate.attention_flops * (1.0 if own_kernels else rate.portable_share)
        forward = flops * padded * drawn / (reached * narrow * short)
        return forward, _BACKWARD_ATTENTION * forward
    copies, element = heads * spec.batch.micro_batch_size, spec.element_bytes
    own = length // spec.parallelism.context
    scores = product_seconds(own, width, length, element, rate, copies)
    weighted = product_seconds(own, length, value, element, rate, copies)
    return scores + weighted, 2 * (scores + weighted)
