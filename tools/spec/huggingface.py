"""A Hugging Face `config.json` as Megatron's flags: GPT-2, Llama, Mistral, Qwen2, Mixtral."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.spec.flags import flag_words

_LONGEST = 8192
"""Longest sequence taken from a config: 128k is what a model can, not how it was trained."""

_HALVES = {"float16": "--fp16", "bfloat16": "--bf16"}


class ConfigError(ValueError):
    """A config that Megatron's GPT cannot be built from; the message names the file and the field."""


def flags_of_config(path: Path) -> tuple[str, ...]:
    """Megatron's flags for the model that a `config.json` describes.

    Raises:
        ConfigError: It is not JSON, of another architecture, or lacks a field.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The config {path} cannot be read: {error}.") from None
    kind = str(config.get("model_type")) if isinstance(config, dict) else "none"
    if kind not in _KINDS:
        raise ConfigError(
            f"{path} has the model_type '{kind}', which has no mapping to Megatron's flags here; "
            f"known are {', '.join(_KINDS)}, or write an .args file."
        )
    _refuse_unsupported(config, path)
    try:
        flags = _KINDS[kind](config)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the field {error}; add it.") from None
    half = _HALVES.get(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return (*flag_words(flags), "--micro-batch-size", "1", *((half,) if half else ()))


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    """What would make it another model than the flags say."""
    if config.get("quantization_config"):
        raise ConfigError(f"{path} has a quantization_config; plan the unquantised model.")
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < _sequence(config):
        raise ConfigError(
            f"{path} has a sliding_window of {window}, and the planner knows full attention alone; set "
            "it to null to plan that."
        )


def _sequence(config: Mapping[str, Any]) -> int:
    return min(_LONGEST, config.get("max_position_embeddings") or config.get("n_positions") or 1024)


def _gpt2(config: Mapping[str, Any]) -> dict[str, object]:
    hidden = config["n_embd"]
    return {
        "--num-layers": config["n_layer"],
        "--hidden-size": hidden,
        "--ffn-hidden-size": config.get("n_inner") or 4 * hidden,
        "--num-attention-heads": config["n_head"],
        "--seq-length": config["n_positions"],
        "--max-position-embeddings": config["n_positions"],
        "--vocab-size": config["vocab_size"],
        "--hidden-dropout": config.get("resid_pdrop", 0.1),
        "--attention-dropout": config.get("attn_pdrop", 0.1),
        "--untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", True),
    }


def _llama(config: Mapping[str, Any]) -> dict[str, object]:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": heads,
        "--group-query-attention": groups != heads,
        "--num-query-groups": groups if groups != heads else None,
        "--kv-channels": width if width * heads != config["hidden_size"] else None,
        "--seq-length": _sequence(config),
        "--max-position-embeddings": config["max_position_embeddings"],
        "--position-embedding-type": "rope",
        "--rotary-base": int(config.get("rope_theta", 10000)),
        "--normalization": "RMSNorm",
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--add-qkv-bias": bool(config.get("attention_bias")),
        "--untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", False),
        "--hidden-dropout": 0,
        "--attention-dropout": config.get("attention_dropout", 0),
        "--vocab-size": config["vocab_size"],
    }


def _qwen2(config: Mapping[str, Any]) -> dict[str, object]:
    return {**_llama(config), "--add-qkv-bias": True}


def _mixtral(config: Mapping[str, Any]) -> dict[str, object]:
    return {
        **_llama(config),
        "--num-experts": config["num_local_experts"],
        "--moe-router-topk": config["num_experts_per_tok"],
        "--moe-ffn-hidden-size": config["intermediate_size"],
        "--moe-aux-loss-coeff": config.get("router_aux_loss_coef", 0.001),
        "--moe-token-dispatcher-type": "alltoall",
    }


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, object]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "mixtral": _mixtral,
}
