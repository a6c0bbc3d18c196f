"""Seconds of arithmetic and of memory traffic on one rank, for one micro batch.

A matrix product takes its FLOPs at the achieved rate or its operands' bytes at the achieved memory
bandwidth, whichever is more; elementwise kernels take their bytes alone. Kernels are Megatron's fused
ones. Figures that say "measured" are of an H200 (tools/plan/README.md, "What an H200 showed").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tools.plan.memory import QUANTISED_BYTES, held_parameters, logit_elements, precision_of
from tools.plan.tensors import rank_tensors
from tools.plan.time.rates import DeviceRates
from tools.spec.model import AHEAD, MAMBA, LatentAttention, Mamba
from tools.spec.run import Quantised, Recompute, RunSpec

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
_NORM_AND_CLIP_BYTES = 4 + 8


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer, one micro batch."""

    forward_matmul: float
    input_gradients: float
    weight_gradients: float
    forward_attention: float
    forward_memory: float
    backward_attention: float
    backward_memory: float


def layer_seconds(spec: RunSpec, rate: DeviceRates, frozen: bool = False) -> LayerSeconds:
    """Times of a layer of one kind; a frozen one computes no gradients of weights."""
    forward, backward = _elementwise_bytes(spec)
    context_forward, context_backward = _context_bytes(spec)
    scan_forward, scan_backward = _scan_bytes(spec)
    scores_forward, scores_backward = _scores_bytes(spec)
    routed_forward, routed_backward = _routed_bytes(spec)
    products = tuple(_products(spec))
    cast_forward, cast_backward = _cast_bytes(products, rate.quantised)
    attention, attention_backward = _attention_seconds(spec, rate)
    added = 0.0 if frozen else sum(p.copies * p.inner * p.columns for p in products)
    added *= rate.measured.gradient_seconds / rate.share
    forward = int(forward * rate.elementwise) + context_forward + routed_forward + cast_forward
    backward = int(backward * rate.elementwise) + context_backward + routed_backward + cast_backward
    forward, backward = forward + scan_forward, backward + scan_backward
    element = spec.element_bytes
    return LayerSeconds(
        forward_matmul=sum(
            product_seconds(p.rows, p.inner, p.columns, element, rate, p.copies, p.quantised)
            for p in products
        ),
        input_gradients=sum(
            product_seconds(p.rows, p.columns, p.inner, element, rate, p.copies, p.quantised)
            for p in products
        ),
        weight_gradients=0.0
        if frozen
        else sum(
            product_seconds(p.inner, p.rows, p.columns, element, rate, p.copies, p.quantised, True)
            for p in products
        ),
        forward_attention=attention + scores_forward / rate.bytes_per_second,
        forward_memory=forward / rate.bytes_per_second + _drawing_seconds(spec, rate),
        backward_attention=attention_backward + scores_backward / rate.bytes_per_second,
        backward_memory=backward / rate.bytes_per_second + added,
    )


_DRAWING_SECONDS = 0.2e-9
"""Of a processor for a random number of a dropout in a kernel that torch.compile wrote (measured: bias,
dropout and addition of 42 million elements take 153 µs on 132 processors, where the bytes take 85). The
TorchScript kernels of the years before Hopper were not measured, and count none."""


def _drawing_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Random numbers of both hidden dropouts of a layer; backward reads the masks."""
    numbers = spec.tokens * spec.shape.hidden // spec.sequence_shards * spec.shape.norms
    return numbers * _DRAWING_SECONDS / rate.processors if spec.dropout and rate.compiled else 0.0


def forward_passes(spec: RunSpec) -> tuple[int, int, int]:
    """Times that matrix products, attention and elementwise kernels run forward for a backward."""
    if spec.recompute is Recompute.FULL:
        return 2, 2, 2
    selective = spec.recompute is Recompute.SELECTIVE
    return 1, 2 if selective and not spec.fused_attention else 1, 1


def embedding_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Look-up, positions, dropout, and the gradients' scatter: memory traffic."""
    elements = spec.tokens * spec.shape.hidden
    seconds = 10 * spec.element_bytes * elements / rate.bytes_per_second
    return seconds + _table_gradient_seconds(spec, rate)


def head_seconds(spec: RunSpec, rate: DeviceRates) -> tuple[float, float]:
    """Output layer and loss of one micro batch: matrix products, and memory traffic."""
    shape, tokens = spec.shape, spec.tokens
    width = shape.padded_vocabulary(spec.parallelism.tensor) // spec.parallelism.tensor
    hidden, element = shape.hidden, spec.element_bytes
    matmul = product_seconds(tokens, hidden, width, element, rate)
    matmul += product_seconds(tokens, width, hidden, element, rate)
    matmul += product_seconds(hidden, tokens, width, element, rate, accumulated=True)
    matmul *= shape.predicted
    passes: float = _FORWARD_CROSS_ENTROPY_BYTES + _BACKWARD_CROSS_ENTROPY_BYTES
    if spec.dtype != "fp32":
        passes += 2 * spec.element_bytes
    if rate.fused_loss:
        passes = _FUSED_CROSS_ENTROPY_PASSES * spec.element_bytes
    logits = shape.predicted * logit_elements(spec)
    loss = passes * logits / rate.bytes_per_second
    each = rate.measured.logit_seconds
    if each is not None:
        matmul = 6 * tokens * hidden * width / rate.flops * shape.predicted
        loss = logits * each / rate.share
    return matmul, loss + _table_gradient_seconds(spec, rate)


def _table_gradient_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Of the embedding's, or the output layer's: made whole, and added to those before."""
    tensor = spec.parallelism.tensor
    table = spec.shape.padded_vocabulary(tensor) * spec.shape.hidden // tensor
    return table * rate.measured.gradient_seconds / rate.share


def optimizer_seconds(spec: RunSpec, rate: DeviceRates, pipeline_rank: int) -> float:
    """Adam, clipping, copies between precisions, and zeroing gradients: memory traffic."""
    precision = precision_of(spec)
    held, gradients = held_parameters(spec, pipeline_rank)
    measured = rate.measured
    if measured.parameter_seconds is not None:
        seconds = held * measured.parameter_seconds
        tensors = len(rank_tensors(spec, pipeline_rank))
        return (seconds + tensors * measured.tensor_seconds) / rate.share
    copies = precision.gradient_copies and precision.gradients + 4 + 8
    weights = precision.weights + 4 if precision.main_parameters else 0
    # Moments in fewer bytes are read and written in fewer.
    a_parameter = _ADAM_BYTES - 2 * (8 - precision.adam) + _NORM_AND_CLIP_BYTES + copies + weights
    touched = held * a_parameter + gradients * precision.gradients
    return touched / rate.bytes_per_second


@dataclass(frozen=True, slots=True)
class _Product:
    """`copies` products of rows×inner by inner×columns."""

    rows: int
    inner: int
    columns: int
    copies: int = 1
    quantised: bool = True


_SPLITS = (1, 2, 4)
"""Parts of the inner dimension that are computed beside each other where a result has few tiles."""


@lru_cache(maxsize=65536)
def product_seconds(
    rows: int,
    inner: int,
    columns: int,
    element_bytes: int,
    rate: DeviceRates,
    copies: int = 1,
    quantised: bool = False,
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
        quantised: Whether the operands are in fewer bits, where the run has such.
        accumulated: Whether the result is added to gradients in fp32.
    """
    if not rows * inner * columns:
        return 0.0
    fewer = quantised and bool(rate.quantised)
    flops = rate.quantised_flops if fewer else rate.flops
    fill = rate.fill * (flops / rate.flops)
    seconds = min(
        2
        * _tiled(rows, columns, copies * parts, rate)
        * rate.processors
        * (inner / parts + fill)
        / flops
        + (parts - 1) * 2 * 4 * copies * rows * columns / rate.bytes_per_second
        for parts in _SPLITS
    )
    width = QUANTISED_BYTES[rate.quantised] if fewer else element_bytes
    written = element_bytes
    if accumulated and rate.processors > 1:
        written = _ACCUMULATED_BYTES
    operands = width * (rows * inner + inner * columns) + written * rows * columns
    loading = copies * operands / rate.bytes_per_second
    if rate.processors == 1:
        return seconds + loading
    return max(seconds, loading) + _PRODUCT_KERNEL_SECONDS


_ACCUMULATED_BYTES = 8
"""A gradient in fp32, read and written (`--gradient-accumulation-fusion`)."""
_PRODUCT_KERNEL_SECONDS = 3e-6
"""Start and end of a product's kernel (measured)."""


def _tiled(rows: int, columns: int, copies: int, rate: DeviceRates) -> float:
    """Elements of the result that each processor computes; a core's tiles are too small to count."""
    if rate.processors == 1:
        return rows * columns * copies
    return min(
        -(-copies * -(-rows // high) * -(-columns // wide) // rate.processors) * high * wide / share
        for high, wide, share in rate.tiles
    )


def _products(spec: RunSpec) -> Iterator[_Product]:
    """Forward products of one layer: attention's projections, and the MLP or the routed experts."""
    shape, tensor = spec.shape, spec.parallelism.tensor
    tokens, hidden = spec.tokens, shape.hidden
    if shape.blocks == MAMBA and shape.mamba:
        yield from _mamba_products(spec, shape.mamba)
        return
    if shape.blocks == AHEAD:
        yield _Product(tokens, 2 * hidden, hidden // tensor)
    if shape.latent:
        yield from _latent_products(spec, shape.latent)
    else:
        width = shape.heads * shape.head_width // tensor
        qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width // tensor
        yield _Product(tokens, hidden, qkv)
        yield _Product(tokens, width, hidden)
    gate = 2 if shape.gated else 1
    dense = shape.shared_expert_ffn if shape.experts else shape.ffn_hidden
    if dense:
        yield _Product(tokens, hidden, dense // tensor * gate)
        yield _Product(tokens, dense // tensor, hidden)
    if not shape.experts:
        return
    own = spec.tokens // spec.sequence_shards
    yield _Product(own, hidden, shape.experts, quantised=False)
    copies = shape.experts // spec.parallelism.expert
    split = spec.parallelism.tensor_of_experts
    ffn = shape.expert_ffn_hidden // split
    routed = max(1, tokens * split // tensor * shape.experts_per_token // copies)
    if shape.latent_experts:
        yield _Product(own, hidden, shape.latent_experts)
        yield _Product(own, shape.latent_experts, hidden)
        hidden = shape.latent_experts
    yield _Product(routed, hidden, ffn * gate, copies)
    yield _Product(routed, ffn, hidden, copies)


_CHUNK = 128
"""Tokens of a Mamba-2 mixer's scan that are one matrix (`mamba_mixer.py: chunk_size`)."""


def _mamba_products(spec: RunSpec, mamba: Mamba) -> Iterator[_Product]:
    """Projections, and the scan as matrix products (arXiv:2405.21060 section 6): in a chunk a group's
    scores and each head's sum by them, across chunks each head's state and what it adds."""
    tensor, tokens, hidden = spec.parallelism.tensor, spec.tokens, spec.shape.hidden
    yield _Product(tokens, hidden, mamba.projected // tensor)
    yield _Product(tokens, mamba.width // tensor, hidden)
    chunks = -(-tokens // _CHUNK)
    groups, heads = chunks * mamba.groups // tensor, chunks * mamba.heads // tensor
    state, width = mamba.state, mamba.head_width
    yield _Product(_CHUNK, state, _CHUNK, groups, quantised=False)
    yield _Product(_CHUNK, _CHUNK, width, heads, quantised=False)
    yield _Product(state, _CHUNK, width, heads, quantised=False)
    yield _Product(_CHUNK, state, width, heads, quantised=False)


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
    element, tokens = spec.element_bytes, spec.tokens // tensor
    convolution = 2 * element * tokens * mamba.convolved
    states = 4 * 4 * tokens * mamba.width * mamba.state // _CHUNK
    scanned = element * tokens * mamba.width
    forward = convolution + states + (4 + 3) * scanned
    return forward, 3 * (convolution + states) + (12 + 6) * scanned


def _latent_products(spec: RunSpec, latent: LatentAttention) -> Iterator[_Product]:
    """Down-projections of a rank's own tokens, up-projections of its heads."""
    hidden, tokens = spec.shape.hidden, spec.tokens
    heads, own = spec.shape.heads // spec.parallelism.tensor, tokens // spec.sequence_shards
    queries = heads * (latent.head_width + latent.rotary_width)
    if latent.query_rank:
        yield _Product(own, hidden, latent.query_rank)
    yield _Product(tokens, latent.query_rank or hidden, queries)
    yield _Product(own, hidden, latent.key_value_rank + latent.rotary_width)
    values = heads * latent.value_width
    yield _Product(tokens, latent.key_value_rank, heads * latent.head_width + values)
    yield _Product(tokens, values, hidden)


def _cast_bytes(products: Sequence[_Product], quantised: Quantised) -> tuple[int, int]:
    """Memory traffic of quantising a layer's operands, forward and backward.

    An operand is read in two bytes and written twice, as it is and transposed for the weights' gradient
    (Transformer Engine, `cast_transpose`); one scale a tensor needs one more reading for its maximum,
    and NVFP4 has one beside those of its blocks (arXiv:2509.25149 §4.1).
    """
    if not quantised:
        return 0, 0
    read = 4 if quantised in (Quantised.TENSORWISE, Quantised.NVFP4) else 2
    width = int(read + 2 * QUANTISED_BYTES[quantised])
    inputs = sum(p.copies * p.rows * p.inner for p in products if p.quantised)
    outputs = sum(p.copies * p.rows * p.columns for p in products if p.quantised)
    return width * inputs, width * outputs


_WIDE_HEAD = 128
_NARROW_HEAD = 0.4
_SHORT_SEQUENCE = 720
"""Keys that a row of scores' start and end are worth (measured, of cuDNN and FlashAttention 2)."""
_DROPOUT_ATTENTION = 1.5
"""Each score's random number is drawn inside the kernel, again in backward (measured: 1,858 µs for
1,232 at a width of 80 and 1,024 keys)."""
_BACKWARD_ATTENTION = 2.5
"""Five products in backward for two in forward: the scores are computed again (arXiv:2205.14135)."""


def _attention_seconds(spec: RunSpec, rate: DeviceRates) -> tuple[float, float]:
    """Scores and their product with V, forward and backward; only fused attention skips what is masked.

    Fused, its rate falls with the head's width, which the tensor cores' exponentials do not, and on
    short sequences. Unfused, both are matrix products, one a head.
    """
    shape = spec.shape
    heads, length = shape.heads // spec.parallelism.tensor, shape.seq_length
    width = value = shape.head_width
    if shape.latent:
        width = shape.latent.head_width + shape.latent.rotary_width
        value = shape.latent.value_width
    if spec.fused_attention:
        flops = spec.tokens * length * heads * (width + value)
        padded = -(-width // 32) * 32 / width
        narrow = min(1.0, padded * width / _WIDE_HEAD) ** _NARROW_HEAD if rate.narrow_heads else 1.0
        short = length / (length + _SHORT_SEQUENCE)
        drawn = _DROPOUT_ATTENTION if spec.dropout else 1.0
        forward = flops * padded * drawn / (rate.attention_flops * narrow * short)
        return forward, _BACKWARD_ATTENTION * forward
    copies, element = heads * spec.batch.micro_batch_size, spec.element_bytes
    own = length // spec.parallelism.context
    scores = product_seconds(own, width, length, element, rate, copies)
    weighted = product_seconds(own, length, value, element, rate, copies)
    return scores + weighted, 2 * (scores + weighted)


def _routed_bytes(spec: RunSpec) -> tuple[int, int]:
    """Memory traffic of permuting tokens to their experts and back, and of the router's scores."""
    shape = spec.shape
    if not shape.experts:
        return 0, 0
    own = spec.tokens // spec.sequence_shards
    hidden = shape.latent_experts or shape.hidden
    moved = own * shape.experts_per_token * hidden * spec.element_bytes
    scores = 6 * 4 * own * shape.experts
    return 4 * moved + scores, 4 * moved + scores


_LONGEST_FUSED_SOFTMAX = 4096
_FUSED_SOFTMAX_ROWS = 4
_TORCH_SOFTMAX_BYTES = 33, 34
"""More a score, forward and backward: casts, scale, mask and softmax in fp32, each read and written."""


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


def _scores_bytes(spec: RunSpec) -> tuple[int, int]:
    """Unfused attention writes its scores and reads them back, four times over."""
    if spec.fused_attention:
        return 0, 0
    shape, element = spec.shape, spec.element_bytes
    heads = shape.heads // spec.parallelism.tensor
    scores = heads * spec.tokens * shape.seq_length
    dropout = 2 * element + 1 if spec.dropout else 0
    more = (0, 0) if softmax_is_fused(spec) else _TORCH_SOFTMAX_BYTES
    forward, backward = 4 * element + dropout + more[0], 6 * element + dropout + more[1]
    return forward * scores, backward * scores


def _elementwise_bytes(spec: RunSpec) -> tuple[int, int]:
    """Memory traffic of norms, dropouts, residuals, activations and bias gradients."""
    shape, element = spec.shape, spec.element_bytes
    hidden = spec.tokens * shape.hidden // spec.sequence_shards
    forward_masks, backward_masks = (2, 10) if spec.dropout else (0, 0)
    share = shape.norms / 2
    tensor = spec.parallelism.tensor
    ffn = shape.ffn_hidden
    if shape.experts:
        ffn = shape.experts_per_token * shape.expert_ffn_hidden + shape.shared_expert_ffn
    first = ffn * (2 if shape.gated else 1)
    qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width
    biases = qkv + first if shape.bias else 0
    forward_wide = element * spec.tokens * (first + ffn) // tensor
    backward_wide = element * spec.tokens * (2 * first + ffn + biases) // tensor
    norm_and_residual = 10 * element + forward_masks
    backward_hidden = 12 * element + backward_masks + (2 * element if shape.bias else 0)
    laid_forward, laid_backward = _laid_out_bytes(spec)
    forward = int(share * norm_and_residual * hidden) + forward_wide + laid_forward
    return forward, int(share * backward_hidden * hidden) + backward_wide + laid_backward


def _laid_out_bytes(spec: RunSpec) -> tuple[int, int]:
    """Memory traffic between the projections and attention: rotary positions, and queries, keys and
    values taken out of one tensor and their gradients put into one (`attention.py:
    get_query_key_value_tensors`; learnt positions and as many groups as heads need neither)."""
    shape = spec.shape
    rotary = not shape.positions
    grouped = shape.query_groups < shape.heads
    if shape.blocks == MAMBA or not shape.heads or not (rotary or grouped):
        return 0, 0
    moved = 2 * spec.element_bytes * spec.tokens // spec.parallelism.tensor
    if shape.latent:
        latent = shape.latent
        # Queries in place, keys and values out of one tensor, each head's key with the same rotary part.
        width = (
            latent.rotary_width + latent.head_width + latent.value_width + latent.rotary_width // 2
        )
        return moved * shape.heads * width, moved * shape.heads * width
    queries, keys = shape.heads * shape.head_width, shape.query_groups * shape.head_width
    turned = moved * (queries + keys) if rotary else 0
    taken = moved * queries if grouped else 0
    return turned + taken, turned + moved * (queries + 2 * keys)


def _context_bytes(spec: RunSpec) -> tuple[int, int]:
    """Memory traffic that context parallelism adds to attention, forward and backward.

    Ring: K and V are packed, the first step's result is read and written; of each further step's,
    which works on half of the queries or half of the keys, three quarters are read, added to and
    written. Gathered: K and V are put in order as many times as they are gathered. All-to-all:
    every tensor is reordered before and after its exchange.
    """
    parallelism, shape = spec.parallelism, spec.shape
    ranks = parallelism.context
    if ranks == 1:
        return 0, 0
    element = spec.element_bytes * spec.tokens
    queries = element * shape.heads * shape.head_width // parallelism.tensor
    keys = 2 * element * shape.query_groups * shape.head_width // parallelism.tensor
    if spec.cp_comm_type == "all_gather":
        return 2 * ranks * keys, 4 * ranks * keys
    if spec.cp_comm_type == "a2a":
        return 4 * (2 * queries + keys), 4 * (2 * queries + keys)
    merging = 2 * 4 + 3 * 3 * (ranks - 1)
    return 2 * keys + merging * queries // 4, merging * (queries + keys) // 4
