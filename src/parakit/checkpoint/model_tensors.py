"""List the tensors that a model has in Megatron's checkpoints: names and shapes, from the model's dimensions.

The names are those of Megatron 0.19 (`sharded_state_dict`). A norm has one name in Megatron's local layers and
another in Transformer Engine's layers, which fuse the norm with the linear layer that follows it.
`parakit.costs` counts the same tensors without their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from parakit.artifacts.torch_dist import Shape
from parakit.config.model import LatentAttention, ModelShape

LAYERS, MTP_LAYERS = "decoder.layers.", "mtp.layers."
"""Prefixes of the tensors in layers. The number of an MTP layer always follows; that of a decoder layer
follows if the layers are not all of one kind."""

_LAYER_NUMBER = re.compile(r"^(decoder\.layers|mtp\.layers)\.\d+\.")
_INPUT_NORM = (
    "self_attention.linear_qkv.layer_norm_{}",
    "self_attention.linear_q_down_proj.layer_norm_{}",
    "self_attention.linear_kv_down_proj.layer_norm_{}",
    "self_attention.linear_qkv_down_proj.layer_norm_{}",
    "input_layernorm.{}",
)
_MLP_NORM = ("mlp.linear_fc1.layer_norm_{}", "pre_mlp_layernorm.{}")
_QUERY_RANK_NORM = (
    "self_attention.q_layernorm.{}",
    "self_attention.linear_q_up_proj.layer_norm_{}",
)
_KEY_RANK_NORM = (
    "self_attention.kv_layernorm.{}",
    "self_attention.linear_kv_up_proj.layer_norm_{}",
)
_MTP_LAYER = ("transformer_layer.", "mtp_model_layer.")
"""Names of the transformer layer in an MTP layer, by Megatron's versions."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model, with the names that it can have in a checkpoint."""

    names: tuple[str, ...]
    """Names without the number of a decoder layer. Exactly one of them is stored."""
    shape: Shape
    """Full shape. Experts are stacked in the first dimension, and layers are not."""
    layers: tuple[int, ...] = ()
    """Decoder layers that have the tensor, counted from 0; empty for a tensor outside of these layers."""
    is_optional: bool = False
    """True if some versions of Megatron do not store the tensor."""

    def names_in_layer(self, layer: int) -> tuple[str, ...]:
        """Return the names with the number of a decoder layer, as in models whose layers differ."""
        return tuple(name.replace(LAYERS, f"{LAYERS}{layer}.", 1) for name in self.names)


def list_model_tensors(shape: ModelShape) -> tuple[ModelTensor, ...]:
    """Return the tensors of a model, but for the embedding and the output layer, whose rows Megatron pads.

    Of a model with Mamba mixers, linear attention or other blocks than attention and MLP, only the embedding of
    positions is returned.
    """
    return tuple(_iterate_tensors(shape))


def is_described(shape: ModelShape) -> bool:
    """Return True if `list_model_tensors` returns all tensors of the model's layers."""
    return not (shape.blocks or shape.mamba or shape.linear)


@cache
def known_tensor_names() -> frozenset[str]:
    """Return all names that `list_model_tensors` can give to a tensor of some model, without layer numbers."""
    plain = ModelShape(
        layers=1,
        hidden=4,
        heads=1,
        query_groups=1,
        head_width=4,
        ffn_hidden=4,
        seq_length=4,
        positions=4,
        qk_norm=True,
        mtp_layers=1,
    )
    experts = replace(
        plain, experts=2, shared_expert_ffn=4, shared_expert_gate=True, latent_experts=2, sink=True
    )
    latent = LatentAttention(2, key_value_rank=2, head_width=2, rotary_width=2, value_width=2)
    shapes = (
        plain,
        experts,
        replace(plain, latent=latent),
        replace(plain, latent=replace(latent, query_rank=0)),
    )
    return frozenset(
        remove_layer_number(name)
        for shape in shapes
        for tensor in list_model_tensors(shape)
        for name in tensor.names
    )


def remove_layer_number(name: str) -> str:
    """Return a tensor's name without the number of its layer."""
    return _LAYER_NUMBER.sub(r"\1.", name)


def _iterate_tensors(shape: ModelShape) -> Iterator[ModelTensor]:
    """Yield the tensors that `list_model_tensors` returns."""
    if shape.positions:
        name = "embedding.position_embeddings.weight"
        yield ModelTensor((name,), (shape.positions, shape.hidden))
    if not is_described(shape):
        return
    yield from _norm(shape, ("decoder.final_layernorm.{}",))
    for kind, layers in shape.layer_kinds:
        for tensor in _iterate_layer_tensors(kind):
            names = tuple(f"{LAYERS}{name}" for name in tensor.names)
            yield replace(tensor, names=names, layers=tuple(sorted(layers)))
    layer_of_mtp = shape.without_experts if shape.mtp_is_dense else shape
    for number in range(shape.stored_mtp_layers):
        prefix = f"{MTP_LAYERS}{number}."
        yield ModelTensor((f"{prefix}eh_proj.weight",), (shape.hidden, 2 * shape.hidden))
        for norm in ("enorm", "hnorm", "final_layernorm"):
            yield from _norm(shape, (f"{prefix}{norm}.{{}}",))
        for tensor in _iterate_layer_tensors(layer_of_mtp):
            names = tuple(f"{prefix}{layer}{name}" for layer in _MTP_LAYER for name in tensor.names)
            yield replace(tensor, names=names)


def _iterate_layer_tensors(shape: ModelShape) -> Iterator[ModelTensor]:
    """Yield the tensors of one layer with attention and an MLP or experts. Names are relative to the layer."""
    # Layers with latent attention do not rename their norms, so that is the name to look for first.
    preferred = -1 if shape.latent else 1
    yield from _norm(shape, _INPUT_NORM[::preferred])
    yield from _latent_attention(shape, shape.latent) if shape.latent else _attention(shape)
    if shape.sink:
        name = "self_attention.core_attention.softmax_offset"
        yield ModelTensor((name,), (shape.heads,))
    yield from _norm(shape, _MLP_NORM[::preferred])
    if not shape.experts:
        yield from _mlp(shape, "mlp.", shape.ffn_hidden)
        return
    yield ModelTensor(("mlp.router.weight",), (shape.experts, shape.hidden))
    # Earlier versions of Megatron have no bias in the router, and --moe-router-enable-expert-bias makes a
    # buffer that is no dimension of the model.
    yield ModelTensor(("mlp.router.bias",), (shape.experts,), is_optional=True)
    yield ModelTensor(("mlp.router.expert_bias",), (shape.experts,), is_optional=True)
    if shape.latent_experts:
        widths = (shape.latent_experts, shape.hidden)
        yield ModelTensor(("mlp.fc1_latent_proj.weight",), widths)
        yield ModelTensor(("mlp.fc2_latent_proj.weight",), widths[::-1])
    routed = replace(shape, hidden=shape.latent_experts) if shape.latent_experts else shape
    for tensor in _mlp(routed, "mlp.experts.experts.", shape.expert_ffn_hidden):
        yield replace(tensor, shape=(shape.experts, *tensor.shape))
    if shape.shared_expert_ffn:
        yield from _mlp(shape, "mlp.shared_experts.", shape.shared_expert_ffn)
        if shape.shared_expert_gate:
            yield ModelTensor(("mlp.shared_experts.gate_weight",), (1, shape.hidden))


def _attention(shape: ModelShape) -> Iterator[ModelTensor]:
    """Yield the projections of attention, and the norms of queries and keys."""
    gate = 2 if shape.output_gate else 1
    qkv_rows = shape.head_width * (shape.heads * gate + 2 * shape.query_groups)
    attention_width = shape.heads * shape.head_width
    yield from _linear("self_attention.linear_qkv", qkv_rows, shape.hidden, False)
    if shape.bias or shape.qkv_bias:
        yield ModelTensor(("self_attention.linear_qkv.bias",), (qkv_rows,))
    yield from _linear("self_attention.linear_proj", shape.hidden, attention_width, shape.bias)
    if shape.qk_norm:
        for name in ("q_layernorm", "k_layernorm"):
            yield from _norm(shape, (f"self_attention.{name}.{{}}",), shape.head_width)


def _latent_attention(shape: ModelShape, latent: LatentAttention) -> Iterator[ModelTensor]:
    """Yield the projections of latent attention, and the norms of its compressed queries and keys."""
    module, hidden, key_rank = "self_attention", shape.hidden, latent.key_value_rank
    query_rows = shape.heads * (latent.head_width + latent.rotary_width)
    key_value_rows = shape.heads * (latent.head_width + latent.value_width)
    if latent.query_rank:
        yield from _linear(f"{module}.linear_q_down_proj", latent.query_rank, hidden, False)
        yield from _linear(f"{module}.linear_q_up_proj", query_rows, latent.query_rank, False)
        if shape.qk_norm:
            yield from _norm(shape, _QUERY_RANK_NORM, latent.query_rank)
    else:
        yield from _linear(f"{module}.linear_q_proj", query_rows, hidden, False)
    down_rows = key_rank + latent.rotary_width
    yield from _linear(f"{module}.linear_kv_down_proj", down_rows, hidden, False)
    yield from _linear(f"{module}.linear_kv_up_proj", key_value_rows, key_rank, False)
    if shape.qk_norm:
        yield from _norm(shape, _KEY_RANK_NORM, key_rank)
    width = shape.heads * latent.value_width
    yield from _linear(f"{module}.linear_proj", hidden, width, shape.bias)


def _mlp(shape: ModelShape, prefix: str, ffn: int) -> Iterator[ModelTensor]:
    """Yield the two linear layers of an MLP with `ffn` columns; a gate doubles the rows of the first."""
    rows = ffn * (2 if shape.gated else 1)
    yield from _linear(f"{prefix}linear_fc1", rows, shape.hidden, shape.bias)
    yield from _linear(f"{prefix}linear_fc2", shape.hidden, ffn, shape.bias)


def _linear(module: str, rows: int, columns: int, has_bias: bool) -> Iterator[ModelTensor]:
    """Yield the weight of a linear layer, and its bias if it has one."""
    yield ModelTensor((f"{module}.weight",), (rows, columns))
    if has_bias:
        yield ModelTensor((f"{module}.bias",), (rows,))


def _norm(shape: ModelShape, names: tuple[str, ...], width: int = 0) -> Iterator[ModelTensor]:
    """Yield the weight of a norm, and its bias unless it is an RMSNorm; 0 is the hidden state's width."""
    for parameter in ("weight",) if shape.rms_norm else ("weight", "bias"):
        filled_names = tuple(name.format(parameter) for name in names)
        yield ModelTensor(filled_names, (width or shape.hidden,))


def find_stored_name(names: tuple[str, ...], stored: Mapping[str, object]) -> str | None:
    """Return the name among `names` that a checkpoint stores; None if it stores none of them."""
    return next((name for name in names if name in stored), None)
