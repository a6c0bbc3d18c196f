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

from parakit.config.model import LINEAR, MAMBA, MTP, ModelShape
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

    Only the experts that a token is routed to count. The vocabulary is padded as for one device, so
    that strategies are compared on equal work.
    """
    layers = shape.count_layers_by_kind(shape.mtp_layers)
    every = [(count * times, kind) for count, layer in layers for times, kind in layer.block_shapes]
    every.append((shape.mtp_layers, shape.with_only_block(MTP)))
    kinds = [(times, _kind_flops(kind, seq_length)) for times, kind in every]
    names = ("attention_projections", "attention_scores", "mlp", "router")
    layer = {name: sum(times * getattr(kind, name) for times, kind in kinds) for name in names}
    logits = 2 * shape.predicted_tokens * shape.hidden * shape.padded_vocabulary()
    return TokenFlops(**layer, logits=logits)


def _kind_flops(shape: ModelShape, seq_length: int | None) -> TokenFlops:
    """Return the forward FLOPs per token of one layer of one kind, without logits."""
    length = shape.effective_attention_length(seq_length or shape.seq_length)
    queries = shape.heads * shape.head_width
    keys_and_values = 2 * shape.query_groups * shape.head_width
    matrices = 3 if shape.gated else 2
    hidden, routed = shape.hidden, shape.latent_experts or shape.hidden
    mlp = shape.ffn_hidden * hidden
    if shape.experts:
        mlp = shape.experts_per_token * shape.expert_ffn_hidden * routed
        mlp += shape.shared_expert_ffn * hidden
    widths = (3 if shape.output_gate else 2) * queries + keys_and_values
    projections, scores = hidden * widths, 2 * queries * length
    if latent := shape.latent:
        up_to, values = latent.query_rank or hidden, shape.heads * latent.value_width
        rotated = shape.heads * (latent.head_width + latent.rotary_width)
        projections = hidden * (latent.query_rank + latent.key_value_rank + latent.rotary_width)
        projections += latent.key_value_rank * (shape.heads * latent.head_width + values)
        projections += up_to * rotated + values * hidden
        scores = (rotated + values) * length
    if shape.blocks == MAMBA and shape.mamba:
        projections = hidden * (shape.mamba.projected_columns + shape.mamba.width)
        scores = _SCAN * shape.mamba.width * shape.mamba.state
    elif shape.blocks == LINEAR and (linear := shape.linear):
        projections = hidden * (linear.projected_columns + linear.value_channels)
        projections += linear.kernel * linear.convolved_channels
        projections += _DELTA_RULE * linear.value_channels * linear.value_width
    elif shape.blocks == MTP:
        projections = 2 * hidden * hidden
    narrowed = 2 * hidden * shape.latent_experts if shape.experts else 0
    return TokenFlops(
        attention_projections=2 * projections,
        attention_scores=round(scores),
        mlp=2 * matrices * mlp,
        router=2 * (hidden * shape.experts + narrowed),
        logits=0,
    )


def flops_by_convention(spec: RunSpec, counts: Collection[str]) -> float:
    """Return the FLOPs per token, forward and backward, as a source with these conventions counts
    them.

    `counts` are words of `FLOP_CONVENTIONS`; empty means the model's own FLOPs.
    """
    flops, recomputed = token_flops(spec.shape), 0.0
    scores = flops.attention_scores * (2 if WHOLE_ATTENTION in counts else 1)
    logits = 0 if NO_VOCABULARY in counts else flops.logits
    mlp = flops.mlp + flops.router
    if WITH_RECOMPUTE in counts:
        repeats, ranks = spec.recompute.recomputes, range(spec.parallelism.pipeline)
        recomputed += scores if repeats("core_attn") else 0
        recomputed += mlp if repeats("moe" if spec.shape.experts else "mlp") else 0
        recomputed += flops.attention_projections if repeats() else 0
        if spec.recompute.is_block_method:
            recomputed *= sum(map(spec.num_recomputed_layers, ranks)) / sum(
                map(spec.num_layers_on_stage, ranks)
            )
    return (
        _BACKWARD_AND_FORWARD * (flops.attention_projections + scores + mlp + logits) + recomputed
    )


def model_flops(shape: ModelShape, samples: int, seq_length: int | None = None) -> int:
    """Return the FLOPs of training on `samples` sequences, forward and backward, over all devices.

    Recomputation does not count, so the result gives MFU and not HFU.
    """
    tokens = samples * (seq_length or shape.seq_length)
    return _BACKWARD_AND_FORWARD * tokens * token_flops(shape, seq_length).total


def mfu(flops: float, seconds: float, devices: int, peak_flops_per_second: float) -> float:
    """Return the model FLOPs utilisation: the model's FLOPs per second, divided by all devices'
    dense peak.
    """
    return flops / (seconds * devices * peak_flops_per_second)
