"""A Hugging Face `config.json` as Megatron's flags, and for GPT-2 and Llama back.

The planner takes GPT-2, Llama, Mistral, Qwen2, Qwen3, Mixtral and DeepSeek V3. Weights are converted of
GPT-2 and Llama alone, and only where Megatron's flags say exactly what the config says (`exact_flags`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from tools.spec.flags import Flags, flag_words

_LONGEST = 8192
"""Longest sequence taken from a config: 128k is what a model can, not how it was trained."""

_HALVES = {"float16": "--fp16", "bfloat16": "--bf16", "float32": ""}

TANH_GELU, EXACT_GELU = "--openai-gelu", "--no-bias-gelu-fusion"
"""GPT-2's GELU is the tanh approximation, which Megatron's core computes in its fusion alone."""

CONVERTED = ("gpt2", "llama")
"""Model types whose weights are converted."""

_ACTIVATIONS = {
    "gelu_new": TANH_GELU,
    "gelu_pytorch_tanh": TANH_GELU,
    "gelu": EXACT_GELU,
}
_EPSILON, _MEGATRONS_EPSILON = "--norm-epsilon", 1e-5
_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3's scaling of rotary frequencies; of its values Megatron has a flag for `factor` alone."""


class ConfigError(ValueError):
    """A config that Megatron's GPT cannot be built from; the message names the file and the field."""


def flags_of_config(path: Path) -> tuple[str, ...]:
    """Megatron's flags for the model that a `config.json` describes.

    Raises:
        ConfigError: It is not JSON, of another architecture, or lacks a field.
    """
    config = read_config(path)
    kind = config["model_type"]
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
    half = _HALVES[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
    return (*flag_words(flags), "--micro-batch-size", "1", *((half,) if half else ()))


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`, with a `model_type`.

    Raises:
        ConfigError: It cannot be read, or is no JSON object.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The config {path} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"The config {path} is no JSON object; give a model's config.json.")
    return {**config, "model_type": str(config.get("model_type"))}


def exact_flags(path: Path) -> tuple[str, ...]:
    """Megatron's flags for a model whose weights are to be converted.

    Raises:
        ConfigError: As `flags_of_config`, or a value that no flag of Megatron's expresses.
    """
    config = read_config(path)
    kind = config["model_type"]
    if kind not in CONVERTED:
        raise ConfigError(
            f"{path} has the model_type '{kind}', whose weights are not converted here; known are "
            f"{' and '.join(CONVERTED)}."
        )
    flags = flags_of_config(path)
    for field, value, wanted in _INEXACT[kind](config):
        raise ConfigError(
            f"{path} has {field} = {json.dumps(value)}, which Megatron's flags cannot express; only "
            f"{wanted} can be converted."
        )
    return flags


def config_of_flags(words: Sequence[str], dtype: str) -> dict[str, Any]:
    """The `config.json` of a model that is trained with these flags of Megatron's.

    Args:
        words: Megatron's arguments, the vocabulary among them.
        dtype: torch's name of the stored weights' type.

    Raises:
        ConfigError: It is neither GPT-2 nor Llama; the message names the flag.
    """
    flags = Flags(words)
    for flag, why in _NO_COUNTERPART.items():
        if flags.has(flag):
            raise ConfigError(f"{flag} {why}, so the model is neither GPT-2 nor Llama.")
    if flags.text("--position-embedding-type") == "rope":
        return {**_llama_config(flags), "dtype": dtype, "torch_dtype": dtype}
    return {**_gpt2_config(flags), "dtype": dtype, "torch_dtype": dtype}


_WHOLE = (
    "n_embd",
    "n_layer",
    "n_head",
    "n_positions",
    "n_inner",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "vocab_size",
    "sliding_window",
    "num_local_experts",
    "num_experts_per_tok",
    "num_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_MAY_BE_NULL = ("n_inner", "num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank")
_MAY_BE_ZERO = (
    *("n_shared_experts", "num_nextn_predict_layers", "first_k_dense_replace"),
    *("n_group", "topk_group"),
)
_NUMBERS = (
    "rope_theta",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "router_aux_loss_coef",
)


def _refuse_other_kinds(config: Mapping[str, Any], path: Path) -> None:
    """Values of another kind than their field's."""

    def wrong(field: str, wanted: str) -> ConfigError:
        return ConfigError(f"{path} has {field} = {json.dumps(config[field])[:40]}; use {wanted}.")

    for field in _WHOLE:
        value = config.get(field, 1)
        if value is None and field in _MAY_BE_NULL:
            continue
        if type(value) is not int or value < 1:
            raise wrong(field, "a whole number of 1 or more")
    for field in _MAY_BE_ZERO:
        if type(value := config.get(field) or 0) is not int or value < 0:
            raise wrong(field, "a whole number of 0 or more")
    for field in _NUMBERS:
        if type(value := config.get(field, 0)) not in (int, float) or not isfinite(value):
            raise wrong(field, "a number")
    for field in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(field) or {}, dict):
            raise wrong(field, "an object or null")
    for field in ("dtype", "torch_dtype"):
        if config.get(field) and config[field] not in tuple(_HALVES):
            raise wrong(field, " or ".join(_HALVES))


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    """What would make it another model than the flags say."""
    _refuse_other_kinds(config, path)
    if config.get("quantization_config"):
        raise ConfigError(f"{path} has a quantization_config; plan the unquantised model.")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ConfigError(
            f"{path} has dense layers among those of experts (decoder_sparse_step, mlp_only_layers), "
            "which are not planned."
        )
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
        _ACTIVATIONS.get(config.get("activation_function", "gelu_new"), TANH_GELU): True,
        _EPSILON: _other_epsilon(config.get("layer_norm_epsilon", 1e-5)),
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
        "--rotary-base": int(_rotary(config).get("rope_theta", 10000)),
        "--use-rope-scaling": _scaling(config) == "llama3",
        "--rope-scaling-factor": _rotary(config)["factor"]
        if _scaling(config) == "llama3"
        else None,
        "--normalization": "RMSNorm",
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--add-qkv-bias": bool(config.get("attention_bias")),
        "--untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", False),
        "--hidden-dropout": 0,
        "--attention-dropout": config.get("attention_dropout", 0),
        "--vocab-size": config["vocab_size"],
        _EPSILON: _other_epsilon(config.get("rms_norm_eps", 1e-6)),
    }


def _other_epsilon(value: float) -> float | None:
    return None if value == _MEGATRONS_EPSILON else value


def _rotary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary embedding: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` before."""
    before = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    return {**before, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _scaling(config: Mapping[str, Any]) -> str:
    rotary = _rotary(config)
    return str(rotary.get("rope_type") or rotary.get("type") or "default")


def _qwen2(config: Mapping[str, Any]) -> dict[str, object]:
    return {**_llama(config), "--add-qkv-bias": True}


def _qwen3(config: Mapping[str, Any]) -> dict[str, object]:
    return {**_llama(config), "--qk-layernorm": True}


def _experts(config: Mapping[str, Any], experts: str, columns: str) -> dict[str, object]:
    """Flags of a mixture; its config has the numbers of experts and of their columns in these fields."""
    return {
        "--num-experts": config[experts],
        "--moe-router-topk": config["num_experts_per_tok"],
        "--moe-ffn-hidden-size": config[columns],
        "--moe-aux-loss-coeff": config.get("router_aux_loss_coef", 0.001),
        "--moe-token-dispatcher-type": "alltoall",
    }


def _mixtral(config: Mapping[str, Any]) -> dict[str, object]:
    return _llama(config) | _experts(config, "num_local_experts", "intermediate_size")


def _qwen3_moe(config: Mapping[str, Any]) -> dict[str, object]:
    return _qwen3(config) | _experts(config, "num_experts", "moe_intermediate_size")


def _deepseek_v3(config: Mapping[str, Any]) -> dict[str, object]:
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    return {
        **_qwen3(config),
        **_experts(config, "n_routed_experts", "moe_intermediate_size"),
        "--multi-latent-attention": True,
        "--q-lora-rank": config.get("q_lora_rank"),
        "--kv-lora-rank": config["kv_lora_rank"],
        "--qk-head-dim": config["qk_nope_head_dim"],
        "--qk-pos-emb-head-dim": config["qk_rope_head_dim"],
        "--v-head-dim": config["v_head_dim"],
        "--moe-shared-expert-intermediate-size": shared or None,
        "--moe-layer-freq": f"([0]*{dense}+[1]*{layers - dense})" if dense else None,
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-num-groups": config.get("n_group") or None,
        "--moe-router-group-topk": config.get("topk_group") or None,
        "--mtp-num-layers": config.get("num_nextn_predict_layers") or None,
    }


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, object]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}


Inexact = Iterator[tuple[str, Any, str]]
"""Fields of a config that Megatron's flags do not express: name, value, and what would do."""


def _inexact_gpt2(config: Mapping[str, Any]) -> Inexact:
    wanted = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for field, value in wanted.items():
        if config.get(field, value) != value:
            yield field, config[field], json.dumps(value)
    activation = config.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        yield "activation_function", activation, " or ".join(_ACTIVATIONS)
    if config.get("resid_pdrop", 0.1) != config.get("embd_pdrop", 0.1):
        yield "embd_pdrop", config.get("embd_pdrop", 0.1), "resid_pdrop's value"


def _inexact_llama(config: Mapping[str, Any]) -> Inexact:
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for field, value in wanted.items():
        if config.get(field, value) != value:
            yield field, config[field], json.dumps(value)
    rotary, scaling = _rotary(config), _scaling(config)
    base = rotary.get("rope_theta", 10000)
    if base != int(base):
        yield "rope_theta", base, "a whole number"
    if rotary.get("partial_rotary_factor", 1) != 1:
        yield "partial_rotary_factor", rotary["partial_rotary_factor"], "1"
    if scaling not in ("default", "llama3"):
        yield "rope_type", scaling, "default or llama3"
    for field, value in _SCALING.items() if scaling == "llama3" else ():
        if rotary.get(field, value) != value:
            yield field, rotary[field], str(value)


_INEXACT: Mapping[str, Callable[[Mapping[str, Any]], Inexact]] = {
    "gpt2": _inexact_gpt2,
    "llama": _inexact_llama,
}

_NO_COUNTERPART = {
    "--num-experts": "makes it a mixture of experts",
    "--qk-layernorm": "normalises queries and keys",
    "--add-qkv-bias": "adds biases to queries, keys and values alone",
    "--multi-latent-attention": "makes its attention latent",
    "--mtp-num-layers": "predicts several tokens",
    "--softmax-type": "changes its softmax",
    "--attention-output-gate": "gates its attention",
    "--squared-relu": "changes its activation",
    "--quick-geglu": "changes its activation",
    "--apply-layernorm-1p": "adds one to its norms' weights",
    "--window-size": "limits its attention",
    "--rotary-percent": "turns a part of each head alone",
}


def _refuse_mixture(flags: Flags, family: str, wanted: Mapping[str, bool]) -> None:
    for flag, is_there in wanted.items():
        if flags.has(flag) != is_there:
            has, would = ("lacks", "has") if is_there else ("has", "lacks")
            raise ConfigError(
                f"The model {has} {flag}, which {family} {would}; it has no config.json of either."
            )


def _common_config(flags: Flags) -> dict[str, Any]:
    normalization = flags.text("--normalization")
    rotary = flags.text("--position-embedding-type") == "rope"
    if normalization != ("RMSNorm" if rotary else "LayerNorm"):
        raise ConfigError(
            f"--normalization {normalization} with {'rotary' if rotary else 'learned'} positions is "
            "neither GPT-2 nor Llama."
        )
    return {
        "vocab_size": flags.integer("--vocab-size"),
        "tie_word_embeddings": not flags.has("--untie-embeddings-and-output-weights"),
        "initializer_range": flags.number("--init-method-std"),
    }


def _gpt2_config(flags: Flags) -> dict[str, Any]:
    _refuse_mixture(
        flags,
        "GPT-2",
        {"--swiglu": False, "--disable-bias-linear": False, "--group-query-attention": False},
    )
    hidden, dropout = flags.integer("--hidden-size"), flags.number("--hidden-dropout")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": flags.integer("--num-layers"),
        "n_embd": hidden,
        "n_inner": flags.integer("--ffn-hidden-size", 4 * hidden),
        "n_head": flags.integer("--num-attention-heads"),
        "n_positions": flags.integer("--max-position-embeddings"),
        "activation_function": "gelu" if flags.has(EXACT_GELU) else "gelu_new",
        "layer_norm_epsilon": flags.number(_EPSILON),
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": flags.number("--attention-dropout"),
        **_common_config(flags),
    }


def _llama_config(flags: Flags) -> dict[str, Any]:
    _refuse_mixture(flags, "Llama", {"--swiglu": True, "--disable-bias-linear": True})
    heads, hidden = flags.integer("--num-attention-heads"), flags.integer("--hidden-size")
    scaling = {
        "rope_type": "llama3",
        "factor": flags.number("--rope-scaling-factor"),
        **_SCALING,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": flags.integer("--num-layers"),
        "hidden_size": hidden,
        "intermediate_size": flags.integer("--ffn-hidden-size"),
        "num_attention_heads": heads,
        "num_key_value_heads": flags.integer("--num-query-groups", heads),
        "head_dim": flags.integer("--kv-channels", hidden // heads),
        "max_position_embeddings": flags.integer("--max-position-embeddings"),
        "rope_theta": float(flags.integer("--rotary-base")),
        **({"rope_scaling": scaling} if flags.has("--use-rope-scaling") else {}),
        "rms_norm_eps": flags.number(_EPSILON),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": flags.number("--attention-dropout"),
        **_common_config(flags),
    }
