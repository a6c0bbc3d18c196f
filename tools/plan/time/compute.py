"""Seconds of arithmetic and of memory traffic on one rank, for one micro batch.

A matrix product takes its FLOPs at the achieved rate plus its operands' bytes at the achieved
memory bandwidth; elementwise kernels take their bytes alone. Kernels are Megatron's fused ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.memory import PRECISIONS, held_parameters, logit_elements
from tools.plan.time.cluster import Cluster
from tools.spec.run import Recompute, RunSpec

_FORWARD_CROSS_ENTROPY_BYTES = 4 + 4 + 8 + 8 + 4 + 8
"""fp32 passes over the logits in `VocabParallelCrossEntropy`: copy out, maximum, subtract,
exponential, sum, divide."""
_BACKWARD_CROSS_ENTROPY_BYTES = 8 + 4
_ADAM_BYTES = 28
"""Read weight, both moments and gradient; write the first three."""
_NORM_AND_CLIP_BYTES = 4 + 8


class NoPeakError(ValueError):
    """The device has no rate for this dtype."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer, one micro batch."""

    forward_matmul: float
    forward_attention: float
    forward_memory: float
    backward_attention: float
    backward_memory: float


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Achieved rates of one device in one dtype."""

    flops: float
    attention_flops: float
    bytes_per_second: float


def rates(cluster: Cluster, dtype: str) -> DeviceRates:
    """Achieved rates.

    Raises:
        NoPeakError: The device has no matrix rate in this dtype.
    """
    peak = cluster.device.peak_flops(dtype)
    if peak is None:
        raise NoPeakError(f"{cluster.device.name} has no {dtype} rate; use another --dtype.")
    calibration = cluster.calibration
    matmul = cluster.device.matmul_fraction if calibration.matmul is None else calibration.matmul
    return DeviceRates(
        flops=peak * matmul,
        attention_flops=peak * calibration.attention,
        bytes_per_second=cluster.device.memory_bytes_per_second * calibration.memory,
    )


def layer_seconds(spec: RunSpec, rate: DeviceRates) -> LayerSeconds:
    """Times of one transformer layer."""
    scores = _attention_flops(spec) / rate.attention_flops
    forward, backward = _elementwise_bytes(spec)
    context_forward, context_backward = _context_bytes(spec)
    scores_forward, scores_backward = _scores_bytes(spec)
    return LayerSeconds(
        forward_matmul=_matmul_seconds(spec, rate),
        forward_attention=scores + scores_forward / rate.bytes_per_second,
        forward_memory=(forward + context_forward) / rate.bytes_per_second,
        backward_attention=2 * scores + scores_backward / rate.bytes_per_second,
        backward_memory=(backward + context_backward) / rate.bytes_per_second,
    )


def forward_passes(spec: RunSpec) -> tuple[int, int, int]:
    """Times that matrix products, attention and elementwise kernels run forward for a backward."""
    if spec.recompute is Recompute.FULL:
        return 2, 2, 2
    selective = spec.recompute is Recompute.SELECTIVE
    return 1, 2 if selective and not spec.fused_attention else 1, 1


def embedding_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Look-up, positions, dropout, and the gradients' scatter: memory traffic."""
    elements = spec.tokens * spec.shape.hidden
    return 10 * spec.element_bytes * elements / rate.bytes_per_second


def head_seconds(spec: RunSpec, rate: DeviceRates) -> tuple[float, float]:
    """Output layer and loss of one micro batch: matrix products, and memory traffic."""
    shape, tokens = spec.shape, spec.tokens
    vocabulary = shape.padded_vocabulary(spec.parallelism.tensor)
    width = vocabulary // spec.parallelism.tensor
    matmul = 3 * _product_seconds(tokens, shape.hidden, width, spec, rate)
    passes = _FORWARD_CROSS_ENTROPY_BYTES + _BACKWARD_CROSS_ENTROPY_BYTES
    if spec.dtype != "fp32":
        passes += 2 * spec.element_bytes
    return matmul, passes * logit_elements(spec) / rate.bytes_per_second


def optimizer_seconds(spec: RunSpec, rate: DeviceRates, pipeline_rank: int) -> float:
    """Adam, clipping, copies between precisions, and zeroing gradients: memory traffic."""
    precision = PRECISIONS[spec.dtype]
    held, gradients = held_parameters(spec, pipeline_rank)
    copies = precision.gradient_copies and precision.gradients + 4 + 8
    weights = precision.weights + 4 if precision.main_parameters else 0
    a_parameter = _ADAM_BYTES + _NORM_AND_CLIP_BYTES + copies + weights
    touched = held * a_parameter + gradients * precision.gradients
    return touched / rate.bytes_per_second


def _matmul_seconds(spec: RunSpec, rate: DeviceRates) -> float:
    """Forward products of one layer: QKV, projection, and the MLP or the routed experts."""
    shape, tensor = spec.shape, spec.parallelism.tensor
    tokens, hidden = spec.tokens, shape.hidden
    qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width // tensor
    attention = shape.heads * shape.head_width // tensor
    seconds = _product_seconds(tokens, hidden, qkv, spec, rate)
    seconds += _product_seconds(tokens, attention, hidden, spec, rate)
    ffn, copies = shape.ffn_hidden // tensor, 1
    if shape.experts:
        copies = shape.experts // spec.parallelism.expert
        split = spec.parallelism.tensor_of_experts
        ffn = shape.expert_ffn_hidden // split
        routed = tokens * split // tensor * shape.experts_per_token
        tokens = max(1, routed // copies)
    first = ffn * (2 if shape.gated else 1)
    mlp = _product_seconds(tokens, hidden, first, spec, rate)
    mlp += _product_seconds(tokens, ffn, hidden, spec, rate)
    return seconds + copies * mlp


def _product_seconds(
    rows: int, inner: int, columns: int, spec: RunSpec, rate: DeviceRates
) -> float:
    operands = rows * inner + inner * columns + rows * columns
    moved = spec.element_bytes * operands
    return 2 * rows * inner * columns / rate.flops + moved / rate.bytes_per_second


def _attention_flops(spec: RunSpec) -> float:
    """Scores and their product with V, forward; only fused attention skips what is masked."""
    shape = spec.shape
    width = shape.heads * shape.head_width // spec.parallelism.tensor
    square = 4.0 * spec.tokens * shape.seq_length * width
    return square / 2 if spec.fused_attention else square


def _scores_bytes(spec: RunSpec) -> tuple[int, int]:
    """Unfused attention writes its scores and reads them back, four times over."""
    if spec.fused_attention:
        return 0, 0
    shape, element = spec.shape, spec.element_bytes
    heads = shape.heads // spec.parallelism.tensor
    scores = heads * spec.tokens * shape.seq_length
    dropout = 2 * element + 1 if spec.dropout else 0
    return (4 * element + dropout) * scores, (6 * element + dropout) * scores


def _elementwise_bytes(spec: RunSpec) -> tuple[int, int]:
    """Memory traffic of norms, dropouts, residuals, activations and bias gradients."""
    shape, element = spec.shape, spec.element_bytes
    hidden = spec.tokens * shape.hidden // spec.sequence_shards
    masks = 2 if spec.dropout else 0
    tensor = spec.parallelism.tensor
    ffn = shape.experts_per_token * shape.expert_ffn_hidden if shape.experts else shape.ffn_hidden
    first = ffn * (2 if shape.gated else 1)
    qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width
    biases = qkv + first if shape.bias else 0
    forward_wide = element * spec.tokens * (first + ffn) // tensor
    backward_wide = element * spec.tokens * (2 * first + ffn + biases) // tensor
    norm_and_residual = 10 * element + masks
    backward_hidden = 12 * element + masks + (2 * element if shape.bias else 0)
    forward = norm_and_residual * hidden + forward_wide
    return forward, backward_hidden * hidden + backward_wide


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
