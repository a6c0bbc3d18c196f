"""Write a small model with random weights in the format of `save_pretrained`, without `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parakit.config.huggingface import read_exact_config_flags
from parakit.config.model import model_from_flags
from parakit.convert.hf.families import list_tensor_pairs
from parakit.convert.hf.tensor_files import SHARD_BYTES, TensorHeader, write_tensors

CONFIGS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("random_models.json").read_text()
)
"""The content of `config.json` of one small model per family, by the family's name.

The size of GPT-2's vocabulary is odd, so that TP 2 has to pad it. Llama has the number of positions that
its rotary scaling is made for. Mistral has a linear scaling, and Qwen2 a scaling by YaRN.
"""


def write_model(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    prefix: str | None = None,
) -> Path:
    """Write `config.json` and safetensors of a random model into a new folder, and return the folder.

    Every element of every tensor is random, also in norms and biases. So a test notices if two elements are
    mixed up. The seed is fixed, so equal arguments give equal tensors.

    Args:
        folder: The folder to make; it must not exist.
        config: The content of `config.json`.
        dtype: The type of all tensors.
        shard_bytes: The largest size of a file in bytes.
        prefix: Text with which the tensors' names begin; None takes the family's usual prefix.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    model = model_from_flags(folder.name, "gpt3", read_exact_config_flags(folder / "config.json"))
    headers = [
        TensorHeader(name, shape, dtype)
        for pair in list_tensor_pairs(config["model_type"], model.shape, prefix)
        for name, shape in zip(pair.names, pair.shapes, strict=True)
    ]
    generator = torch.Generator().manual_seed(1)
    values = (_draw_values(header, generator) for header in headers)
    write_tensors(folder, headers, values, shard_bytes)
    return folder


def _draw_values(header: TensorHeader, generator: torch.Generator) -> Tensor:
    """Return normal values of deviation 0.1 around 0, or around 1 for the weight of a norm."""
    values = 0.1 * torch.randn(header.shape, generator=generator)
    is_norm = len(header.shape) == 1 and header.name.endswith("weight")
    return (1 + values if is_norm else values).to(header.dtype)
