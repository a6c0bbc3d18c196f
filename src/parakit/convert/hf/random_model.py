"""A small model with random weights in a folder as `save_pretrained` writes it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parakit.config.huggingface import exact_flags
from parakit.config.model import model_from_flags
from parakit.convert.hf.families import list_tensor_pairs
from parakit.convert.hf.tensor_files import SHARD_BYTES, TensorHeader, write_tensors

CONFIGS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("random_models.json").read_text()
)
"""GPT-2's vocabulary is one that TP 2 pads; Llama's positions are those that its scaling is made for."""


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    prefix: str | None = None,
) -> Path:
    """Make the folder; every element of every tensor is random, norms and biases too."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shape = model_from_flags(folder.name, "gpt3", exact_flags(folder / "config.json")).shape
    described = [
        TensorHeader(name, shape, dtype)
        for pair in list_tensor_pairs(config["model_type"], shape, prefix)
        for name, shape in zip(pair.names, pair.shapes, strict=True)
    ]
    generator = torch.Generator().manual_seed(1)
    values = (_random(one, generator) for one in described)
    write_tensors(folder, described, values, shard_bytes)
    return folder


def _random(one: TensorHeader, generator: torch.Generator) -> Tensor:
    values = 0.1 * torch.randn(one.shape, generator=generator)
    is_norm = len(one.shape) == 1 and one.name.endswith("weight")
    return (1 + values if is_norm else values).to(one.dtype)
