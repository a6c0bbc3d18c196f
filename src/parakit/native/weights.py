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

from parakit.artifacts.torch_dist import (
    NORMS,
    VOCABULARY,
    finished_iteration,
    read_metadata,
    read_tensor,
)
from parakit.native.model import GPT, find_expert_layers

IN_LAYER_PATTERN = re.compile(
    r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.?)?(.*)"
)
"""Of Megatron's names: the number of the layer, that of the expert, and what is in them."""
_PARTS = {
    "word_embeddings": "embedding.word_embeddings",
    "position_embeddings": "embedding.position_embeddings",
    "blocks": "decoder.layers",
    "norm1": "input_layernorm",
    "attention": "self_attention",
    "qkv": "linear_qkv",
    "core": "core_attention",
    "proj": "linear_proj",
    "norm2": "pre_mlp_layernorm",
    "experts": "experts.local_experts",
    "fc1": "linear_fc1",
    "fc2": "linear_fc2",
    "norm": "decoder.final_layernorm",
}
"""Parts of this backend's names, as Megatron has them."""


def megatron_name(name: str) -> str:
    """Megatron's name of a module or parameter of this backend, with the layer's number from 0."""
    return ".".join(_PARTS.get(part, part) for part in name.split("."))


def find_checkpoint_key(name: str) -> tuple[str, tuple[int, ...]]:
    """A checkpoint's key for one of ours, and the layer and the expert where they are stacked."""
    whole = megatron_name(name)
    in_layer = IN_LAYER_PATTERN.fullmatch(whole)
    if in_layer is None:
        return whole, ()
    layer, expert, own = in_layer.groups()
    if expert:
        return f"decoder.layers.mlp.experts.experts.{own}", (int(layer), int(expert))
    for stored, norm in NORMS.items():  # There named as Transformer Engine fuses them.
        own = own.replace(norm, stored)
    return f"decoder.layers.{own}", (int(layer),)


_MULTIPLE = 128


def load_initial_weights(model: GPT, checkpoint: Path) -> None:
    """Copy the checkpoint's weights into a model that is not parallel yet.

    Exits with a sentence if the checkpoint is of another model.
    """
    folder = checkpoint / f"iter_{finished_iteration(checkpoint) or 0:07d}"
    stored = read_metadata(folder).tensors
    tensors = {name: read_tensor(folder, one) for name, one in stored.items()}
    experts = next((layer.count for layer in find_expert_layers(model)), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source, places = find_checkpoint_key(name)
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
