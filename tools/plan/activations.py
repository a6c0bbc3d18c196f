"""Bytes that forward keeps for backward, from arXiv:2205.05198 (its equations 1 to 4), by tensor.

Written per tensor instead of per coefficient so that other widths, dtypes, gated MLPs, grouped
queries and dropout-free training follow; at h→4h, two bytes and dropout the sum is the paper's
sbh(34 + 5as/h), sbh(10 + 24/t + 5as/(ht)) under TP and (sbh/t)(34 + 5as/h) under TP with SP.
"""

from __future__ import annotations

from tools.spec.run import Recompute, RunSpec

_FP32_BYTES = 4


def layer_activation_bytes(configuration: RunSpec) -> int:
    """Bytes that one transformer layer keeps of one micro batch, on one rank."""
    if configuration.recompute is Recompute.FULL:
        return residual_bytes(configuration)
    return whole_layer_bytes(configuration)


def whole_layer_bytes(configuration: RunSpec) -> int:
    """The same without recomputation of whole layers."""
    mlp = _expert_bytes if configuration.shape.experts else _mlp_bytes
    return (
        _outside_tensor_parallel_bytes(configuration)
        + _attention_bytes(configuration)
        + _scores_bytes(configuration)
        + mlp(configuration)
    )


def residual_bytes(configuration: RunSpec) -> int:
    """One hidden state of one micro batch on one rank: a layer's input, a pipeline message."""
    elements = configuration.tokens * configuration.shape.hidden
    return configuration.element_bytes * elements // configuration.sequence_shards


def embedding_bytes(configuration: RunSpec) -> int:
    """Kept by the embedding: its dropout's mask, one byte an element."""
    if not configuration.dropout:
        return 0
    elements = configuration.tokens * configuration.shape.hidden
    return elements // configuration.sequence_shards


def head_bytes(configuration: RunSpec) -> int:
    """Kept by the final norm and the output layer: the input of each."""
    return 2 * residual_bytes(configuration)


def logit_elements(configuration: RunSpec) -> int:
    """Logits of one micro batch on one rank of the last stage; the vocabulary is split over TP."""
    tensor = configuration.parallelism.tensor
    return configuration.tokens * configuration.shape.padded_vocabulary(tensor) // tensor


def logits_bytes(configuration: RunSpec) -> int:
    """Live at the loss: the logits, and their fp32 copy that becomes softmax and then gradient.

    `VocabParallelCrossEntropy` works in place on that copy; fp32 logits are not copied.
    """
    copies = 0 if configuration.dtype == "fp32" else configuration.element_bytes
    return (copies + _FP32_BYTES) * logit_elements(configuration)


def backward_temporary_bytes(configuration: RunSpec) -> int:
    """Gradients alive while one layer's MLP is differentiated: those of its two wide tensors."""
    shape, tensor = configuration.shape, configuration.parallelism.tensor
    ffn = shape.experts_per_token * shape.expert_ffn_hidden if shape.experts else shape.ffn_hidden
    width = ffn * (3 if shape.gated else 2) // tensor
    recomputed = 0
    if configuration.recompute is Recompute.FULL:
        recomputed = whole_layer_bytes(configuration)
    return configuration.element_bytes * configuration.tokens * width + recomputed


def layers_in_flight(configuration: RunSpec, pipeline_rank: int) -> int:
    """Layers' worth of micro batches that a rank holds at its fullest.

    1F1B: (L/p)·min(p − rank, m). Interleaved: arXiv:2104.04473 §2.2 and `get_pp_rank_microbatches`,
    2(p − rank − 1) + (v − 1)p warm-up chunks and the one in work, which is L(1 + (p−1)/(pv)) on
    rank 0.
    """
    parallelism, microbatches = configuration.parallelism, configuration.microbatches
    pipeline, virtual = parallelism.pipeline, parallelism.virtual_stages
    if virtual == 1:
        return configuration.layers_a_stage * min(pipeline - pipeline_rank, microbatches)
    warmup = 2 * (pipeline - pipeline_rank - 1) + (virtual - 1) * pipeline
    chunks = min(warmup + 1, microbatches * virtual)
    return chunks * (configuration.layers_a_stage // virtual)


def _outside_tensor_parallel_bytes(configuration: RunSpec) -> int:
    """Inputs and outputs of two norms, masks of two dropouts: what SP splits and TP does not."""
    elements = configuration.tokens * configuration.shape.hidden // configuration.sequence_shards
    masks = 2 if configuration.dropout else 0
    return (4 * configuration.element_bytes + masks) * elements


def _attention_bytes(configuration: RunSpec) -> int:
    shape = configuration.shape
    heads = 2 * shape.heads + 2 * shape.query_groups  # Q, K, V and the output
    width = heads * shape.head_width // configuration.parallelism.tensor
    return configuration.element_bytes * configuration.tokens * width


def _scores_bytes(configuration: RunSpec) -> int:
    """Softmax statistics if attention is fused, else softmax, dropout mask and dropout output."""
    heads = configuration.shape.heads // configuration.parallelism.tensor
    statistics = _FP32_BYTES * heads * configuration.tokens
    if configuration.fused_attention:
        return statistics
    if configuration.recompute is Recompute.SELECTIVE:
        return 0
    element = configuration.element_bytes
    bytes_a_score = 2 * element + 1 if configuration.dropout else element
    return bytes_a_score * heads * configuration.tokens * configuration.shape.seq_length


def _mlp_bytes(configuration: RunSpec) -> int:
    shape = configuration.shape
    width = shape.ffn_hidden * (3 if shape.gated else 2) // configuration.parallelism.tensor
    return configuration.element_bytes * configuration.tokens * width


def _expert_bytes(configuration: RunSpec) -> int:
    """Routed tokens: permuted input, both wide tensors and the output, and the router's scores."""
    shape, split = configuration.shape, configuration.parallelism.tensor_of_experts
    own = configuration.tokens // configuration.sequence_shards
    routed = own * split * shape.experts_per_token
    wide = shape.expert_ffn_hidden * (3 if shape.gated else 2) // split
    ends = 2 * shape.hidden // split
    router = 2 * _FP32_BYTES * configuration.tokens * shape.experts // configuration.sequence_shards
    return configuration.element_bytes * routed * (wide + ends) + router
