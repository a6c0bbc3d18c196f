"""Seconds of arithmetic and of memory traffic on one rank, for one micro batch.

A matrix product takes its FLOPs at the achieved rate plus its operands' bytes at the achieved
memory bandwidth; elementwise kernels take their bytes alone. Kernels are Megatron's fused ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.activations import logit_elements
from tools.plan.cluster import Cluster
from tools.plan.memory import PRECISIONS, held_parameters
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

    @property
    def weight_gradient_matmul(self) -> float:
        """Output gradients times inputs: half of backward's products, and as much work as forward's."""
        return self.forward_matmul

    @property
    def forward(self) -> float:
        """All of forward."""
        return self.forward_matmul + self.forward_attention + self.forward_memory

    @property
    def backward(self) -> float:
        """All of backward, without recomputation."""
        return 2 * self.forward_matmul + self.backward_attention + self.backward_memory


@dataclass(frozen=True, slots=True)
class Rates:
    """Achieved rates of one device in one dtype."""

    flops: float
    attention_flops: float
    bytes_per_second: float


def rates(cluster: Cluster, dtype: str) -> Rates:
    """Achieved rates.

    Raises:
        NoPeakError: The device has no matrix rate in this dtype.
    """
    peak = cluster.device.peak_flops(dtype)
    if peak is None:
        raise NoPeakError(f"{cluster.device.name} has no {dtype} rate; use another --dtype.")
    calibration = cluster.calibration
    matmul = cluster.device.matmul_fraction if calibration.matmul is None else calibration.matmul
    return Rates(
        flops=peak * matmul,
        attention_flops=peak * calibration.attention,
        bytes_per_second=cluster.device.memory_bytes_per_second * calibration.memory,
    )


def layer_seconds(configuration: RunSpec, rate: Rates) -> LayerSeconds:
    """Times of one transformer layer."""
    scores = _attention_flops(configuration) / rate.attention_flops
    forward, backward = _elementwise_bytes(configuration)
    context_forward, context_backward = _context_bytes(configuration)
    scores_forward, scores_backward = _scores_bytes(configuration)
    return LayerSeconds(
        forward_matmul=_matmul_seconds(configuration, rate),
        forward_attention=scores + scores_forward / rate.bytes_per_second,
        forward_memory=(forward + context_forward) / rate.bytes_per_second,
        backward_attention=2 * scores + scores_backward / rate.bytes_per_second,
        backward_memory=(backward + context_backward) / rate.bytes_per_second,
    )


def forward_passes(configuration: RunSpec) -> tuple[int, int, int]:
    """Times that matrix products, attention and elementwise kernels run forward for a backward."""
    if configuration.recompute is Recompute.FULL:
        return 2, 2, 2
    selective = configuration.recompute is Recompute.SELECTIVE
    return 1, 2 if selective and not configuration.fused_attention else 1, 1


def embedding_seconds(configuration: RunSpec, rate: Rates) -> float:
    """Look-up, positions, dropout, and the gradients' scatter: memory traffic."""
    elements = configuration.tokens * configuration.shape.hidden
    return 10 * configuration.element_bytes * elements / rate.bytes_per_second


def head_seconds(configuration: RunSpec, rate: Rates) -> tuple[float, float]:
    """Output layer and loss of one micro batch: matrix products, and memory traffic."""
    shape, tokens = configuration.shape, configuration.tokens
    vocabulary = shape.padded_vocabulary(configuration.parallelism.tensor)
    width = vocabulary // configuration.parallelism.tensor
    matmul = 3 * _product_seconds(tokens, shape.hidden, width, configuration, rate)
    passes = _FORWARD_CROSS_ENTROPY_BYTES + _BACKWARD_CROSS_ENTROPY_BYTES
    if configuration.dtype != "fp32":
        passes += 2 * configuration.element_bytes
    return matmul, passes * logit_elements(configuration) / rate.bytes_per_second


def optimizer_seconds(configuration: RunSpec, rate: Rates, pipeline_rank: int) -> float:
    """Adam, clipping, copies between precisions, and zeroing gradients: memory traffic."""
    precision = PRECISIONS[configuration.dtype]
    held, gradients = held_parameters(configuration, pipeline_rank)
    copies = precision.gradient_copies and precision.gradients + 4 + 8
    weights = precision.weights + 4 if precision.main_parameters else 0
    a_parameter = _ADAM_BYTES + _NORM_AND_CLIP_BYTES + copies + weights
    touched = held * a_parameter + gradients * precision.gradients
    return touched / rate.bytes_per_second


def _matmul_seconds(configuration: RunSpec, rate: Rates) -> float:
    """Forward products of one layer: QKV, projection, and the MLP or the routed experts."""
    shape, tensor = configuration.shape, configuration.parallelism.tensor
    tokens, hidden = configuration.tokens, shape.hidden
    qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width // tensor
    attention = shape.heads * shape.head_width // tensor
    seconds = _product_seconds(tokens, hidden, qkv, configuration, rate)
    seconds += _product_seconds(tokens, attention, hidden, configuration, rate)
    ffn, copies = shape.ffn_hidden // tensor, 1
    if shape.experts:
        copies = shape.experts // configuration.parallelism.expert
        split = configuration.parallelism.tensor_of_experts
        ffn = shape.expert_ffn_hidden // split
        routed = tokens * split // tensor * shape.experts_per_token
        tokens = max(1, routed // copies)
    first = ffn * (2 if shape.gated else 1)
    mlp = _product_seconds(tokens, hidden, first, configuration, rate)
    mlp += _product_seconds(tokens, ffn, hidden, configuration, rate)
    return seconds + copies * mlp


def _product_seconds(
    rows: int, inner: int, columns: int, configuration: RunSpec, rate: Rates
) -> float:
    operands = rows * inner + inner * columns + rows * columns
    moved = configuration.element_bytes * operands
    return 2 * rows * inner * columns / rate.flops + moved / rate.bytes_per_second


def _attention_flops(configuration: RunSpec) -> float:
    """Scores and their product with V, forward; only fused attention skips what is masked."""
    shape = configuration.shape
    width = shape.heads * shape.head_width // configuration.parallelism.tensor
    square = 4.0 * configuration.tokens * shape.seq_length * width
    return square / 2 if configuration.fused_attention else square


def _scores_bytes(configuration: RunSpec) -> tuple[int, int]:
    """Unfused attention writes its scores and reads them back, four times over."""
    if configuration.fused_attention:
        return 0, 0
    shape, element = configuration.shape, configuration.element_bytes
    heads = shape.heads // configuration.parallelism.tensor
    scores = heads * configuration.tokens * shape.seq_length
    dropout = 2 * element + 1 if configuration.dropout else 0
    return (4 * element + dropout) * scores, (6 * element + dropout) * scores


def _elementwise_bytes(configuration: RunSpec) -> tuple[int, int]:
    """Memory traffic of norms, dropouts, residuals, activations and bias gradients."""
    shape, element = configuration.shape, configuration.element_bytes
    hidden = configuration.tokens * shape.hidden // configuration.sequence_shards
    masks = 2 if configuration.dropout else 0
    tensor = configuration.parallelism.tensor
    ffn = shape.experts_per_token * shape.expert_ffn_hidden if shape.experts else shape.ffn_hidden
    first = ffn * (2 if shape.gated else 1)
    qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width
    biases = qkv + first if shape.bias else 0
    forward_wide = element * configuration.tokens * (first + ffn) // tensor
    backward_wide = element * configuration.tokens * (2 * first + ffn + biases) // tensor
    norm_and_residual = 10 * element + masks
    backward_hidden = 12 * element + masks + (2 * element if shape.bias else 0)
    forward = norm_and_residual * hidden + forward_wide
    return forward, backward_hidden * hidden + backward_wide


def _context_bytes(configuration: RunSpec) -> tuple[int, int]:
    """Memory traffic that context parallelism adds to attention, forward and backward.

    Ring: K and V are packed, the first step's result is read and written; of each further step's,
    which works on half of the queries or half of the keys, three quarters are read, added to and
    written. Gathered: K and V are put in order as many times as they are gathered. All-to-all:
    every tensor is reordered before and after its exchange.
    """
    parallelism, shape = configuration.parallelism, configuration.shape
    ranks = parallelism.context
    if ranks == 1:
        return 0, 0
    element = configuration.element_bytes * configuration.tokens
    queries = element * shape.heads * shape.head_width // parallelism.tensor
    keys = 2 * element * shape.query_groups * shape.head_width // parallelism.tensor
    if configuration.cp_comm_type == "all_gather":
        return 2 * ranks * keys, 4 * ranks * keys
    if configuration.cp_comm_type == "a2a":
        return 4 * (2 * queries + keys), 4 * (2 * queries + keys)
    merging = 2 * 4 + 3 * 3 * (ranks - 1)
    return 2 * keys + merging * queries // 4, merging * (queries + keys) // 4
