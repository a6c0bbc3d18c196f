"""FLOPs of one iteration: forward and backward, with causal attention counted as half of the
square.

A matrix product of m×k by k×n costs 2·m·k·n. Backward costs twice forward, one product for each
operand's gradient. For a dense model the sum is the closed form of arXiv:2104.04473 §5.1 and of
`megatron/training/training.py: num_floating_point_operations`, which `--log-throughput` divides by
time. Megatron's function ignores windows (`ModelShape.effective_attention_length`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from parakit.config.model import LINEAR, MAMBA, MTP, LatentAttention, ModelShape
from parakit.config.run import RunSpec

_BACKWARD_AND_FORWARD = 3
_SCAN = 7
"""FLOPs of a Mamba-2 mixer's scan per channel and state column, as Megatron counts them
(`num_floating_point_operations: mamba_layer_flops`).
"""
_DELTA_RULE = 4
"""Products with a gated delta net's state per token, as Megatron counts them. Keys are taken to be
as wide as values (`num_floating_point_operations: gdn_layer_flops`).
"""


WHOLE_ATTENTION, NO_VOCABULARY, WITH_RECOMPUTE = "whole-attention", "no-vocabulary", "recomputed"
FLOP_CONVENTIONS = (WHOLE_ATTENTION, NO_VOCABULARY, WITH_RECOMPUTE)
"""How other sources count FLOPs: full instead of causal attention (arXiv:2104.04473 eq. 3, NeMo up
to 25.04), without logits, or with recomputation ("hardware FLOPs", arXiv:2205.05198 appendix A).
"""


@dataclass(frozen=True)
class TokenFlops:
    """Forward FLOPs of one token by component, over all layers."""

    attention_projections: int
    """Projections of attention and Mamba-2 mixers, and all of linear attention: independent of the
    sequence length.
    """
    attention_scores: int
    """Q·Kᵀ and the product with V, causal: half of the square or less with windows. The scan of a
    Mamba-2 mixer.
    """
    mlp: int
    router: int
    """Router, and the projections of tokens that are routed at a smaller width."""
    logits: int

    @property
    def total(self) -> int:
        """FLOPs of all components."""
        projections = self.attention_projections + self.attention_scores
        return projections + self.mlp + self.router + self.logits


@lru_cache(maxsize=4096)
def token_flops(shape: ModelShape, seq_length: int | None = None) -> TokenFlops:
    """Return the forward FLOPs per token, averaged over the positions of a sequence of `seq_length`
    tokens.

    Without `seq_length`, the sequence length of the shape is used. Of the experts, only those that a token is
    routed to count. The vocabulary is padded as for one device, so that all strategies have equal FLOPs.
    """
    projections = scores = mlp = router = 0
    for times, block_shape in _count_blocks(shape):
        flops = _block_flops(block_shape, seq_length)
        projections += times * flops.attention_projections
        scores += times * flops.attention_scores
        mlp += times * flops.mlp
        router += times * flops.router
    logits = 2 * shape.predicted_tokens * shape.hidden * shape.padded_vocabulary()
    return TokenFlops(projections, scores, mlp=mlp, router=router, logits=logits)


def _count_blocks(shape: ModelShape) -> list[tuple[int, ModelShape]]:
    """Return one pair per kind of layer or block: how often it occurs in the model, and its shape.

    Layers of multi-token prediction are included. The blocks that join the two inputs of these layers are
    the last pair.
    """
    counts = [
        (layers * times, block_shape)
        for layers, layer_shape in shape.count_layers_by_kind(shape.mtp_layers)
        for times, block_shape in layer_shape.block_shapes
    ]
    counts.append((shape.mtp_layers, shape.with_only_block(MTP)))
    return counts


def _block_flops(shape: ModelShape, seq_length: int | None) -> TokenFlops:
    """Return the forward FLOPs per token of one layer or block of one kind, without logits."""
    length = shape.effective_attention_length(seq_length or shape.seq_length)
    projection_products, score_flops = _mixer_flops(shape, length)
    hidden = shape.hidden
    products_per_matrix, router_products = hidden * shape.ffn_hidden, 0
    if shape.experts:
        # Experts may work at a smaller width: one projection before and one after them.
        routed_width = shape.latent_experts or hidden
        products_per_matrix = shape.experts_per_token * shape.expert_ffn_hidden * routed_width
        products_per_matrix += shape.shared_expert_ffn * hidden
        router_products = hidden * (shape.experts + 2 * shape.latent_experts)
    matrices = 3 if shape.gated else 2
    return TokenFlops(
        attention_projections=2 * projection_products,
        attention_scores=round(score_flops),
        mlp=2 * matrices * products_per_matrix,
        router=2 * router_products,
        logits=0,
    )


def _mixer_flops(shape: ModelShape, length: float) -> tuple[int, float]:
    """Return two figures of the block that mixes tokens: the products of its projections, and the
    FLOPs of its scores.

    Both are per token, in forward. One product is a multiplication and an addition, which are 2 FLOPs. Each
    token attends to `length / 2` tokens on average. The block is attention, latent attention, a Mamba-2 mixer,
    linear attention, or the projection that joins the two inputs of multi-token prediction. A Mamba-2 mixer has
    a scan in place of scores.
    """
    hidden = shape.hidden
    if shape.blocks == MAMBA and shape.mamba:
        scan_flops = _SCAN * shape.mamba.width * shape.mamba.state
        return hidden * (shape.mamba.projected_columns + shape.mamba.width), scan_flops
    if shape.blocks == MTP:
        return 2 * hidden * hidden, _score_flops(shape, length)
    if shape.blocks == LINEAR and shape.linear:
        linear = shape.linear
        products = hidden * (linear.projected_columns + linear.value_channels)
        products += linear.kernel * linear.convolved_channels
        products += _DELTA_RULE * linear.value_channels * linear.value_width
        return products, _score_flops(shape, length)
    if shape.latent:
        return _latent_projection_products(shape, shape.latent), _score_flops(shape, length)
    # The output projection and an output gate are as wide as the queries.
    query_widths = 3 if shape.output_gate else 2
    columns = (query_widths * shape.heads + 2 * shape.query_groups) * shape.head_width
    return hidden * columns, _score_flops(shape, length)


def _score_flops(shape: ModelShape, length: float) -> float:
    """Return the forward FLOPs per token of one layer's attention: Q·Kᵀ and the product with V.

    Each token attends to `length / 2` tokens on average.
    """
    if not shape.latent:
        return 2 * shape.heads * shape.head_width * length
    query_width = shape.latent.head_width + shape.latent.rotary_width
    return shape.heads * (query_width + shape.latent.value_width) * length


def _latent_projection_products(shape: ModelShape, latent: LatentAttention) -> int:
    """Return the products per token of latent attention's down-projections, up-projections and
    output projection.
    """
    queries = shape.heads * (latent.head_width + latent.rotary_width)
    keys, values = shape.heads * latent.head_width, shape.heads * latent.value_width
    down = shape.hidden * (latent.query_rank + latent.key_value_rank + latent.rotary_width)
    # Without a query rank, queries are projected from the hidden state directly.
    up = (latent.query_rank or shape.hidden) * queries + latent.key_value_rank * (keys + values)
    return down + up + values * shape.hidden


def flops_by_convention(spec: RunSpec, counts: Collection[str]) -> float:
    """Return the FLOPs per token of forward and backward, counted by the conventions of a publication.

    Args:
        counts: Words of `FLOP_CONVENTIONS`, for example that recomputed FLOPs count. Without words, the FLOPs
            that the model itself needs are returned.
    """
    flops = token_flops(spec.shape)
    scores = flops.attention_scores * (2 if WHOLE_ATTENTION in counts else 1)
    logits = 0 if NO_VOCABULARY in counts else flops.logits
    mlp = flops.mlp + flops.router
    forward = flops.attention_projections + scores + mlp + logits
    recomputed = 0.0
    if WITH_RECOMPUTE in counts:
        recompute = spec.recompute
        if recompute.recomputes("core_attn"):
            recomputed += scores
        if recompute.recomputes("moe" if spec.shape.experts else "mlp"):
            recomputed += mlp
        if recompute.is_full:
            recomputed += flops.attention_projections
        if recompute.is_block_method:
            # The method `block` recomputes only the first layers of each virtual stage.
            ranks = range(spec.parallelism.pipeline)
            recomputed_layers = sum(map(spec.num_recomputed_layers, ranks))
            recomputed *= recomputed_layers / sum(map(spec.num_layers_on_stage, ranks))
    return _BACKWARD_AND_FORWARD * forward + recomputed


def model_flops(shape: ModelShape, samples: int, seq_length: int | None = None) -> int:
    """Return the FLOPs of training on `samples` sequences, forward and backward, over all devices.

    Recomputation does not count, so the result gives MFU and not HFU.
    """
    tokens = samples * (seq_length or shape.seq_length)
    return _BACKWARD_AND_FORWARD * tokens * token_flops(shape, seq_length).total


def iteration_flops(spec: RunSpec) -> int:
    """Return the FLOPs of one iteration of a run, forward and backward, over all devices.

    With LoRA, backward computes no gradients of weights, so each frozen matrix costs twice forward in all. The
    FLOPs of the adapters themselves, about one in a hundred, do not count.
    """
    if spec.lora is None:
        return model_flops(spec.shape, spec.batch.global_batch_size)
    flops, tokens = token_flops(spec.shape), spec.tokens_per_iteration
    matrices = flops.total - flops.attention_scores
    return tokens * (2 * matrices + _BACKWARD_AND_FORWARD * flops.attention_scores)


def mfu(flops: float, seconds: float, devices: int, peak_flops_per_second: float) -> float:
    """Return the model FLOPs utilisation: the model's FLOPs per second, divided by all devices'
    dense peak.
    """
    return flops / (seconds * devices * peak_flops_per_second)
