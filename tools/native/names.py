"""This backend's parameters under Megatron's names, in the model and in its checkpoints."""

from __future__ import annotations

import re

LAYER = re.compile(r"blocks\.(\d+)\.?(.*)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.?(.*)")

_OUTSIDE = {
    "word_embeddings": "embedding.word_embeddings",
    "position_embeddings": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "output_layer": "output_layer",
}
_IN_LAYER = {
    "norm1": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.proj": "self_attention.linear_proj",
    "norm2": "pre_mlp_layernorm",
    "mlp.router": "mlp.router",
    "mlp.fc1": "mlp.linear_fc1",
    "mlp.fc2": "mlp.linear_fc2",
}
_STORED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""In checkpoints a norm is named as Transformer Engine fuses it into the linear layer behind it."""


def megatron_name(name: str) -> str:
    """Megatron's name of a parameter of this backend, with the layer's number from 0."""
    module, _, own = name.rpartition(".")
    in_layer = LAYER.fullmatch(module)
    if in_layer is None:
        return f"{_OUTSIDE[module]}.{own}"
    layer = f"decoder.layers.{in_layer[1]}"
    if in_expert := EXPERT.fullmatch(in_layer[2]):
        return f"{layer}.mlp.experts.local_experts.{in_expert[1]}.linear_{in_expert[2]}.{own}"
    return f"{layer}.{_IN_LAYER[in_layer[2]]}.{own}"


def source_of(name: str) -> tuple[str, tuple[int, ...]]:
    """A checkpoint's key for one of ours, and the layer and the expert where they are stacked."""
    whole, layers = megatron_name(name), "decoder.layers."
    if not whole.startswith(layers):
        return whole, ()
    layer, _, rest = whole.removeprefix(layers).partition(".")
    if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", rest):
        return f"{layers}mlp.experts.experts.{expert[2]}", (int(layer), int(expert[1]))
    for norm, stored in _STORED_NORMS.items():
        rest = rest.replace(norm, stored)
    return f"{layers}{rest}", (int(layer),)
