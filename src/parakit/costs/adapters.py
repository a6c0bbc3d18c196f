"""Linear layers of a transformer layer that can have a LoRA adapter, with their sizes and the sizes of the adapters.

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


class LinearLayer(NamedTuple):
    """A kind of linear layer of one transformer layer that can have an adapter."""

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

    def shape_on_rank(self, tensor: int) -> tuple[int, int]:
        """Return the input and output columns of the layer on each of `tensor` ranks."""
        if not self.is_split:
            return self.inputs, self.outputs
        if self.is_row_parallel:
            return self.inputs // tensor, self.outputs
        return self.inputs, self.outputs // tensor

    def adapter_shapes_on_rank(
        self, rank: int, tensor: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the input and output columns of A, and those of B, on each of `tensor` ranks.

        Args:
            rank: LoRA's rank, which is the number of output columns of A on all ranks.
            tensor: Number of ranks over which tensor parallelism splits the layer.
        """
        ranks = tensor if self.is_split else 1
        inputs, _ = self.shape_on_rank(tensor)
        a_outputs = rank if self.is_row_parallel else rank // ranks
        return (inputs, a_outputs), (rank, self.outputs // ranks)

    def elements_per_matrix(self, rank: int, tensor: int) -> tuple[int, int]:
        """Return the elements of A and of B on each of `tensor` ranks."""
        (a_inputs, a_outputs), (b_inputs, b_outputs) = self.adapter_shapes_on_rank(rank, tensor)
        return a_inputs * a_outputs, b_inputs * b_outputs


@lru_cache(maxsize=1024)
def list_adapted_linears(shape: ModelShape, lora: Lora) -> tuple[LinearLayer, ...]:
    """Return the linear layers with an adapter in one layer of a kind that `ModelShape.layer_kinds` lists.

    Layers of other kinds than attention, MLP and experts have no adapter.
    """
    linears: list[LinearLayer] = []
    for times, block in shape.block_shapes:
        linears += list_linears(block) * times
    return tuple(linear for linear in linears if linear.name in lora.targets)


@lru_cache(maxsize=1024)
def list_linears(shape: ModelShape) -> tuple[LinearLayer, ...]:
    """Return the linear layers of attention, MLP and experts in one block or layer.

    Routers and the projections of other blocks are left out.
    """
    linears: list[LinearLayer] = []
    if shape.blocks not in (MLP, EXPERTS, MAMBA, LINEAR, MTP):
        linears += _list_attention_linears(shape)
    gate = 2 if shape.gated else 1
    dense_ffn = 0
    if shape.blocks in ("", EXPERTS) and shape.experts:
        dense_ffn = shape.shared_expert_ffn
        hidden, ffn = shape.latent_experts or shape.hidden, shape.expert_ffn_hidden
        linears.append(LinearLayer("linear_fc1", "experts", hidden, ffn * gate))
        linears.append(LinearLayer("linear_fc2", "experts", ffn, hidden))
    elif shape.blocks in ("", MLP):
        dense_ffn = shape.ffn_hidden
    if dense_ffn:
        linears.append(LinearLayer("linear_fc1", "dense_mlp", shape.hidden, dense_ffn * gate))
        linears.append(LinearLayer("linear_fc2", "dense_mlp", dense_ffn, shape.hidden))
    return tuple(linears)


def _list_attention_linears(shape: ModelShape) -> list[LinearLayer]:
    """Return the projections of attention."""
    hidden, latent = shape.hidden, shape.latent
    if latent is None:
        width = shape.heads * shape.head_width
        queries = width * (2 if shape.output_gate else 1)
        qkv = queries + 2 * shape.query_groups * shape.head_width
        return [
            LinearLayer("linear_qkv", "attention", hidden, qkv),
            LinearLayer("linear_proj", "attention", width, hidden),
        ]
    queries = shape.heads * (latent.head_width + latent.rotary_width)
    keys_and_values = shape.heads * (latent.head_width + latent.value_width)
    key_value_down = latent.key_value_rank + latent.rotary_width
    linears = [
        LinearLayer("linear_kv_down_proj", "attention", hidden, key_value_down, is_split=False),
        LinearLayer("linear_kv_up_proj", "attention", latent.key_value_rank, keys_and_values),
        LinearLayer("linear_proj", "attention", shape.heads * latent.value_width, hidden),
    ]
    if not latent.query_rank:
        return [LinearLayer("linear_q_proj", "attention", hidden, queries), *linears]
    query_rank = latent.query_rank
    return [
        LinearLayer("linear_q_down_proj", "attention", hidden, query_rank, is_split=False),
        LinearLayer("linear_q_up_proj", "attention", query_rank, queries),
        *linears,
    ]
