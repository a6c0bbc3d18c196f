"""Map this backend's parameter names to Megatron's, and load initial weights from a checkpoint.

The initial weights are a torch_dist checkpoint (PyTorch's distributed checkpoint format). Megatron stacks equal
layers in it. One tensor [layers, …] holds a weight of all layers. One tensor [layers, experts, …] holds a weight of
all experts.
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
    PieceReader,
    read_finished_iteration,
    read_metadata,
)
from parakit.native.model import GPT, find_expert_layers

IN_LAYER_PATTERN = re.compile(
    r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.local_experts\.(\d+)\.?)?(.*)"
)
"""Pattern of Megatron's names within a layer.

Its groups are the layer's index, the expert's index (None outside experts) and the name within them.
"""
_MEGATRON_NAME_PARTS = {
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
"""Megatron's name for each part of this backend's dotted names; other parts are the same in both."""
_VOCABULARY_PADDING = 128
"""Rows up to which an imported model pads its vocabulary, so that every strategy can divide it."""


def megatron_name(name: str) -> str:
    """Return Megatron's name of a module or parameter of this backend, with layers counted from 0."""
    return ".".join(_MEGATRON_NAME_PARTS.get(part, part) for part in name.split("."))


def find_checkpoint_key(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the key of a parameter in checkpoints of the format torch_dist, and its index in the stacked tensor.

    The index is () for a parameter outside the layers, (layer,) within a layer, and (layer, expert) within
    an expert. `name` is the parameter's name in this backend.
    """
    full_name = megatron_name(name)
    in_layer = IN_LAYER_PATTERN.fullmatch(full_name)
    if in_layer is None:
        return full_name, ()
    layer, expert, name_in_layer = in_layer.groups()
    if expert:
        return f"decoder.layers.mlp.experts.experts.{name_in_layer}", (int(layer), int(expert))
    # Transformer Engine fuses each norm with the linear layer after it, and checkpoints use its names.
    for fused_name, norm_name in NORMS.items():
        name_in_layer = name_in_layer.replace(norm_name, fused_name)
    return f"decoder.layers.{name_in_layer}", (int(layer),)


def load_initial_weights(model: GPT, checkpoint: Path) -> None:
    """Copy the weights of a checkpoint into a model, before the model is sharded or split.

    Exit with one sentence if the checkpoint belongs to another model.
    """
    iteration = read_finished_iteration(checkpoint) or 0
    folder = checkpoint / f"iter_{iteration:07d}"
    with PieceReader(folder) as reader:
        tensors = {
            key: reader.read_tensor(metadata)
            for key, metadata in read_metadata(folder).tensors.items()
        }
    expert_layers = find_expert_layers(model)
    num_experts = expert_layers[0].num_experts if expert_layers else 0
    stack_sizes = (len(model.blocks), num_experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key, stack_index = find_checkpoint_key(name)
            stored_shape = "nothing"
            if key in tensors:
                value = _select_from_stack(tensors[key], stack_index, stack_sizes)
                if key in VOCABULARY:
                    value = _drop_padding(value, rows=parameter.shape[0])
                if value.shape == parameter.shape:
                    parameter.copy_(value)
                    continue
                stored_shape = str(list(value.shape))
            sys.exit(
                f"{checkpoint} is of another model: {name} should be {list(parameter.shape)} and "
                f"its {key} is {stored_shape}; remove it, and it is made again."
            )


def _drop_padding(value: Tensor, *, rows: int) -> Tensor:
    """Return a vocabulary matrix without the padding rows that an import may have added after the first `rows`.

    A matrix with _VOCABULARY_PADDING or more additional rows is returned unchanged, because it belongs to
    another vocabulary.
    """
    padding = value.shape[0] - rows
    return value[:rows] if 0 < padding < _VOCABULARY_PADDING else value


def _select_from_stack(value: Tensor, index: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the part of a stacked tensor that belongs to one layer, or to one expert of a layer.

    If the tensor stacks another number of layers or experts than `sizes`, the stack itself is returned. Its
    shape then differs from the shape of the parameter, so the caller can report both shapes. An index past the
    last layer would raise an IndexError instead.
    """
    for position, size in zip(index, sizes, strict=False):
        if value.shape[0] != size:
            return value
        value = value[position]
    return value
