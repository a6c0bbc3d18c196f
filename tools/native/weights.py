"""This backend's parameters under Megatron's names, and the shared start's weights of them.

The start is a torch_dist checkpoint, PyTorch's own distributed one. Layers are stacked: one tensor holds
a weight of all of them, [layers, …], and of all experts, [layers, experts, …].
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tools.native.model import GPT, mixtures
from tools.records.torch_dist import (
    NORMS,
    VOCABULARY,
    finished_iteration,
    read_metadata,
    read_tensor,
)

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
    for stored, norm in NORMS.items():  # There named as Transformer Engine fuses them.
        rest = rest.replace(norm, stored)
    return f"{layers}{rest}", (int(layer),)


_MULTIPLE = 128


def load_start(model: GPT, checkpoint: Path) -> None:
    """Copy the checkpoint's weights into a model that is not parallel yet.

    Exits with a sentence if the checkpoint is of another model.
    """
    folder = checkpoint / f"iter_{finished_iteration(checkpoint) or 0:07d}"
    stored = read_metadata(folder).tensors
    tensors = {name: read_tensor(folder, one) for name, one in stored.items()}
    experts = next((layer.count for layer in mixtures(model)), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source, places = source_of(name)
            value = tensors.get(source)
            if value is not None:
                value = _at(value, places, (len(model.blocks), experts))
                if source in VOCABULARY and 0 < value.shape[0] - parameter.shape[0] < _MULTIPLE:
                    value = value[: parameter.shape[0]]  # Imported, with padding for any strategy.
            if value is None or value.shape != parameter.shape:
                found = "nothing" if value is None else list(value.shape)
                sys.exit(
                    f"{checkpoint} is of another model: {name} should be {list(parameter.shape)} and "
                    f"its {source} is {found}; remove it, and it is made again."
                )
            parameter.copy_(value)


def _at(value: Tensor, places: Sequence[int], stacked: Sequence[int]) -> Tensor:
    """One layer's, one expert's part; the whole where the model has another number of them.

    Comparing the whole shape then names the model; an index past the last layer would not.
    """
    for place, count in zip(places, stacked, strict=False):
        if value.shape[0] != count:
            return value
        value = value[place]
    return value
