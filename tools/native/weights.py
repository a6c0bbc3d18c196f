"""The shared start's weights, read from Megatron's torch_dist checkpoint without Megatron.

torch_dist is PyTorch's own distributed checkpoint. Layers are stacked: one tensor holds a weight of all
of them, [layers, …], and of all experts, [layers, experts, …]; `names` says which is which.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tools.native.model import GPT, mixtures
from tools.native.names import source_of
from tools.records.torch_dist import finished_iteration, read_metadata, read_tensor

_MULTIPLE = 128
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def load_start(model: GPT, checkpoint: Path) -> None:
    """Copy the checkpoint's weights into a model that is not parallel yet.

    Exits with a sentence if the checkpoint is of another model.
    """
    stored = read_tensors(checkpoint)
    parameters = dict(model.named_parameters())
    experts = next((layer.count for layer in mixtures(model)), 0)
    with torch.no_grad():
        for name, parameter in parameters.items():
            source, places = source_of(name)
            value = stored.get(source)
            if value is not None:
                value = _at(value, places, (len(model.blocks), experts))
                if source in _PADDED and 0 < value.shape[0] - parameter.shape[0] < _MULTIPLE:
                    value = value[: parameter.shape[0]]  # Imported, with padding for any strategy.
            if value is None or value.shape != parameter.shape:
                found = "nothing" if value is None else list(value.shape)
                sys.exit(
                    f"{checkpoint} is of another model: {name} should be {list(parameter.shape)} and "
                    f"its {source} is {found}; remove it, and it is made again."
                )
            parameter.copy_(value)


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint's newest iteration, by Megatron's name."""
    folder = checkpoint / f"iter_{finished_iteration(checkpoint) or 0:07d}"
    stored = read_metadata(folder).tensors
    return {name: read_tensor(folder, one) for name, one in stored.items()}


def _at(value: Tensor, places: Sequence[int], stacked: Sequence[int]) -> Tensor:
    """One layer's, one expert's part; the whole where the model has another number of them.

    Comparing the whole shape then names the model; an index past the last layer would not.
    """
    for place, count in zip(places, stacked, strict=False):
        if value.shape[0] != count:
            return value
        value = value[place]
    return value
