"""Linear layers that have a LoRA adapter, with the sizes of the adapter's two matrices.

Adapters are split as in Megatron-Bridge (`megatron/bridge/peft/utils.py: ParallelLinearAdapter`). TP splits both
matrices: A by its rank and B by its outputs for a column-parallel layer, A by its inputs and B by its outputs for a
row-parallel layer. Latent attention's down-projections, which TP does not split, have full adapters on each rank. All
experts of a layer share one adapter per linear layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from parakit.config.model import EXPERTS, LINEAR, MAMBA, MLP, MTP, ModelShape
from parakit.config.peft import ROW_PARALLEL_LINEARS, Lora


class AdaptedLinear(NamedTuple):
    """A kind of linear layer of one transformer layer that has an adapter."""

    name: str
    """Name in Megatron-Core, such as `linear_qkv`."""
    component: str
    """Name of a field of `Parameters`."""
    inputs: int
    """Input columns of the layer on all TP ranks."""
    outputs: int
    """Output columns of the layer on all TP ranks."""
    is_split: bool = True
    """False if each TP rank holds the full layer."""

    @property
    def is_row_parallel(self) -> bool:
        """True if TP splits the input columns of the layer."""
        return self.name in ROW_PARALLEL_LINEARS

    def elements_per_matrix(self, rank: int, tensor: int) -> tuple[int, int]:
        """Return the elements of A and of B on each of `tensor` ranks."""
        ranks = tensor if self.is_split else 1
        return rank * self.inputs // ranks, rank * self.outputs // ranks


@lru_cache(maxsize=1024)
def list_adapted_linears(shape: ModelShape, lora: Lora) -> tuple[AdaptedLinear, ...]:
    """Return the linear layers with an adapter in one layer of a kind that `ModelShape.layer_kinds` lists.

    Layers of other kinds than attention, MLP and experts have no adapter.
    """
    linears: list[AdaptedLinear] = []
    for times, block in shape.block_shapes:
        linears += _list_linears(block) * times
    return tuple(linear for linear in linears if linear.name in lora.targets)


def _list_linears(shape: ModelShape) -> list[AdaptedLinear]:
    """Return the linear layers of attention, MLP and experts in one block or layer."""
    linears: list[AdaptedLinear] = []
    if shape.blocks not in (MLP, EXPERTS, MAMBA, LINEAR, MTP):
        linears += _list_attention_linears(shape)
    gate = 2 if shape.gated else 1
    dense_ffn = 0
    if shape.blocks in ("", EXPERTS) and shape.experts:
        dense_ffn = shape.shared_expert_ffn
        hidden, ffn = shape.latent_experts or shape.hidden, shape.expert_ffn_hidden
        linears.append(AdaptedLinear("linear_fc1", "experts", hidden, ffn * gate))
        linears.append(AdaptedLinear("linear_fc2", "experts", ffn, hidden))
    elif shape.blocks in ("", MLP):
        dense_ffn = shape.ffn_hidden
    if dense_ffn:
        linears.append(AdaptedLinear("linear_fc1", "dense_mlp", shape.hidden, dense_ffn * gate))
        linears.append(AdaptedLinear("linear_fc2", "dense_mlp", dense_ffn, shape.hidden))
    return linears


def _list_attention_linears(shape: ModelShape) -> list[AdaptedLinear]:
    """Return the projections of attention."""
    hidden, latent = shape.hidden, shape.latent
    if latent is None:
        width = shape.heads * shape.head_width
        queries = width * (2 if shape.output_gate else 1)
        qkv = queries + 2 * shape.query_groups * shape.head_width
        return [
            AdaptedLinear("linear_qkv", "attention", hidden, qkv),
            AdaptedLinear("linear_proj", "attention", width, hidden),
        ]
    queries = shape.heads * (latent.head_width + latent.rotary_width)
    keys_and_values = shape.heads * (latent.head_width + latent.value_width)
    key_value_down = latent.key_value_rank + latent.rotary_width
    linears = [
        AdaptedLinear("linear_kv_down_proj", "attention", hidden, key_value_down, is_split=False),
        AdaptedLinear("linear_kv_up_proj", "attention", latent.key_value_rank, keys_and_values),
        AdaptedLinear("linear_proj", "attention", shape.heads * latent.value_width, hidden),
    ]
    if not latent.query_rank:
        return [AdaptedLinear("linear_q_proj", "attention", hidden, queries), *linears]
    query_rank = latent.query_rank
    return [
        AdaptedLinear("linear_q_down_proj", "attention", hidden, query_rank, is_split=False),
        AdaptedLinear("linear_q_up_proj", "attention", query_rank, queries),
        *linears,
    ]
