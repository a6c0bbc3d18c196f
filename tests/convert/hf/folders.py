"""Folders as `save_pretrained` writes them, with random weights, made without transformers."""

import json
from pathlib import Path
from typing import Any

import torch

from tools.convert.hf.families import pairs_of
from tools.convert.hf.tensor_files import Described, write_tensors
from tools.spec.huggingface import exact_flags
from tools.spec.model import ModelShape, model_from_flags

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "max_position_embeddings": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_folder(
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 10**9,
    prefix: str | None = None,
) -> Path:
    """A model of a config, every tensor of it random."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    described = [
        Described(name, shape, dtype)
        for pair in pairs_of(config["model_type"], shape_of(folder), prefix)
        for name, shape in zip(pair.names, pair.shapes, strict=True)
    ]
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(one.shape, generator=generator).to(dtype) for one in described)
    write_tensors(folder, described, values, shard_bytes)
    return folder


def shape_of(folder: Path) -> ModelShape:
    return model_from_flags("m", "gpt3", exact_flags(folder / "config.json")).shape
