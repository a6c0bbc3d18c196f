"""A Hugging Face `config.json` as Megatron's flags, and the reverse.

The planner reads GPT-2, Llama, Mistral, GLM, Qwen2, Qwen3, Mixtral, GPT-OSS, DeepSeek V3, Kimi K2,
GLM 4.5, MiniMax M2, Gemma 3 and Nemotron-H configs, whatever type a checkpoint is stored in.
Weights are converted for the types in `CONVERTIBLE_MODEL_TYPES` only, and only if Megatron's flags
express the config exactly (`read_exact_config_flags`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from parakit.config.files import read_regular_file
from parakit.config.flag_table import FLAGS
from parakit.config.flags import Flags, format_flags, merge_flags

_LONGEST = 8192
"""Longest sequence length taken from a config. A config states what a model supports (128k), not
the length that it was trained with.
"""

_HALVES = {"float16": "--fp16", "bfloat16": "--bf16", "float32": ""}

TANH_GELU, EXACT_GELU = "--openai-gelu", "--no-bias-gelu-fusion"
"""Flags of GPT-2's GELU, the tanh approximation; Megatron's core computes it only in its fused
kernel.
"""

CONVERTIBLE_MODEL_TYPES = (
    *("gpt2", "llama", "mistral", "phi3", "smollm3", "qwen2", "qwen3", "glm"),
    *("mixtral", "qwen2_moe", "qwen3_moe"),
)
"""Model types whose weights are converted."""

MEGATRON_BRIDGE = "Megatron-Bridge may convert it"
"""Clause that ends the refusal of a model that this kit does not convert."""

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
"""Llama 3's scaling of rotary frequencies. Megatron has a flag for its `factor` only."""


class ConfigError(ValueError):
    """A config that Megatron's GPT cannot be built from; the message names the file and the field."""


def read_config_flags(path: Path) -> tuple[str, ...]:
    """Return Megatron's flags for the model that a `config.json` describes.

    Raises:
        ConfigError: The file is not JSON, describes an unknown architecture, or lacks a field.
    """
    config = _Config(path, read_config(path))
    kind = config.values["model_type"]
    if kind not in _KINDS:
        raise ConfigError(
            f"{path} has the model_type '{kind}', which has no mapping to Megatron's flags here; "
            f"known are {', '.join(_KINDS)}, or write an .args file."
        )
    _refuse_unsupported(config)
    dtype = config.one_of("dtype", _HALVES) or config.one_of("torch_dtype", _HALVES) or "bfloat16"
    precision_flag = _HALVES[dtype]
    try:
        flags = _KINDS[kind](config)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the field {error}; add it.") from None
    arguments = (*format_flags(flags), "--micro-batch-size", "1")
    return (*arguments, precision_flag) if precision_flag else arguments


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a `config.json`. The value of `model_type` is always a text.

    A file without `model_type` gives the text "None", which is no known type.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    try:
        config = json.loads(read_regular_file(path))
    except OSError as error:
        raise ConfigError(f"The config {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"The config {path} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"The config {path} is no JSON object; give a model's config.json.")
    return {**config, "model_type": str(config.get("model_type"))}


def read_exact_config_flags(path: Path) -> tuple[str, ...]:
    """Return Megatron's flags for the model of a `config.json` whose weights are to be converted.

    The flags of `read_config_flags` suffice for planning. This function adds the flags that change what the model
    computes. It refuses a model that Megatron's flags only approximate.

    Raises:
        ConfigError: `read_config_flags` refuses the file, the weights of this architecture cannot be
            converted, or a field has a value that no flag of Megatron expresses.
    """
    config = _Config(path, read_config(path))
    kind = config.values["model_type"]
    if kind not in CONVERTIBLE_MODEL_TYPES:
        raise ConfigError(
            f"{path} has the model_type '{kind}', whose weights are not converted here; known are "
            f"{', '.join(CONVERTIBLE_MODEL_TYPES)}; {MEGATRON_BRIDGE}."
        )
    if config.has("quantization_config"):
        raise ConfigError(f"{path} has a quantization_config; convert the unquantised model.")
    planning_flags = read_config_flags(path)
    flags = merge_flags(planning_flags, format_flags(_list_exact_flags(config)))
    for field, value, wanted in _inexact(config):
        raise ConfigError(
            f"{path} has {field} = {json.dumps(value)}, which Megatron's flags cannot express; only "
            f"{wanted} can be converted; {MEGATRON_BRIDGE}."
        )
    return flags


def _list_exact_flags(config: _Config) -> dict[str, object]:
    """Return the flags that training needs and planning does not, because they change values but not
    costs.
    """
    flags = _list_rotary_flags(config) | _list_router_flags(config)
    if config.values["model_type"] == "smollm3":
        # Megatron's list marks the layers without rotary embedding, and the config's list those with it.
        marks = ["0" if has_rotary else "1" for has_rotary in _list_rotary_layers(config)]
        flags[_NO_ROTARY] = f"[{','.join(marks)}]"
    return flags


def _list_rotary_layers(config: _Config) -> Sequence[object]:
    """Return a true value for each layer of SmolLM3 with rotary embedding, and a false one for each without."""
    layers = config.whole("num_hidden_layers")
    interval = config.maybe("no_rope_layer_interval") or 4
    stated: Sequence[object] | None = config.values.get("no_rope_layers")
    if stated:
        return stated
    # The last layer of each interval has no rotary embedding.
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _list_rotary_flags(config: _Config) -> dict[str, object]:
    """Return the flags of a linear or YaRN scaling of rotary frequencies.

    The result is empty for other models. With `--mscale-all-dim 0`, Megatron scales queries and keys by the same
    factor as `transformers` does by default.
    """
    rotary = config.rotary
    if config.scaling == "linear":
        return {"--rotary-seq-len-interpolation-factor": int(rotary["factor"])}
    if config.scaling != "yarn":
        return {}
    return {
        "--position-embedding-type": "yarn",
        "--rotary-scaling-factor": rotary["factor"],
        "--yarn-original-max-position-embeddings": rotary["original_max_position_embeddings"],
        "--yarn-beta-fast": rotary.get("beta_fast") or 32,
        "--yarn-beta-slow": rotary.get("beta_slow") or 1,
        "--mscale": 1.0,
        "--mscale-all-dim": 0.0,
        "--no-yarn-correction-range-round-to-int": rotary.get("truncate") is False,
        "--no-rope-fusion": True,
    }


def _list_router_flags(config: _Config) -> dict[str, object]:
    """Return the flags with which Megatron's router computes the same as the router of `transformers`.

    The result is empty for a dense model. `transformers` adds the load-balancing loss only if the model returns
    the router's logits. For other models the flags set the coefficient of this loss to 0.
    """
    if config.values["model_type"] not in _ROUTED:
        return {}
    flags: dict[str, object] = {}
    if not config.has("output_router_logits"):
        flags["--moe-aux-loss-coeff"] = 0.0
    if config.values["model_type"] != "mixtral" and not config.has("norm_topk_prob"):
        # Probabilities are those of all experts, and not scaled to a sum of 1 over the chosen ones.
        flags["--moe-router-pre-softmax"] = True
    return flags


def read_source_config(folder: Path) -> tuple[str, ...]:
    """Return Megatron's flags for the model in a folder in the format of Hugging Face, whose weights are to be
    converted.

    Raises:
        ConfigError: There is no such folder, or `read_exact_config_flags` refuses its config.json.
    """
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}; name one that holds a config.json.")
    return read_exact_config_flags(folder / "config.json")


def build_config(arguments: Sequence[str], dtype: str) -> dict[str, Any]:
    """Return the content of a `config.json` for a model that was trained with these flags of Megatron.

    Args:
        arguments: Megatron's flags. They must include `--vocab-size`.
        dtype: Torch's name of the type of the stored weights.

    Raises:
        ConfigError: No model type that can be converted has these flags. The message names the flag.
    """
    flags = Flags(arguments)
    for flag, why in _NO_COUNTERPART.items():
        is_known = flag == "--rotary-percent" and flags.has(_INTERLEAVED)
        if _differs_from_default(flags, flag) and not is_known:
            raise ConfigError(
                f"{flag} {why}, so the model is none of {', '.join(_CLASSES)}; {MEGATRON_BRIDGE}."
            )
    is_rotary = flags.text("--position-embedding-type") in ("rope", "yarn")
    config = _rotary_config(flags) if is_rotary else _gpt2_config(flags)
    return {**config, "dtype": dtype, "torch_dtype": dtype}


@dataclass(frozen=True)
class _Config:
    """A `config.json` whose fields are checked when they are read."""

    path: Path
    values: Mapping[str, Any]

    def has(self, field: str) -> bool:
        """Return True if the field is present and true."""
        return bool(self.values.get(field))

    def whole(self, field: str) -> int:
        """Return a required whole number of 1 or more."""
        if field not in self.values:
            raise KeyError(field)
        return self.maybe(field) or self._refuse(field, "a whole number of 1 or more")

    def maybe(self, field: str, least: int = 1) -> int | None:
        """Return a whole number; None if the field is absent or null."""
        value = self.values.get(field)
        if value is not None and (type(value) is not int or value < least):
            self._refuse(field, f"a whole number of {least} or more")
        return value

    def number(self, field: str, otherwise: float) -> float:
        """Return a number; `otherwise` if the field is absent."""
        value: float = self.values.get(field, otherwise)
        if type(value) not in (int, float) or not isfinite(value):
            self._refuse(field, "a number")
        return value

    def one_of(self, field: str, known: Iterable[str]) -> str | None:
        """Return one of the known texts; None if the field is absent."""
        value = self.values.get(field)
        if value and value not in tuple(known):
            self._refuse(field, " or ".join(known))
        return value or None

    @property
    def rotary(self) -> Mapping[str, Any]:
        """Fields of rotary positions, by name.

        They come from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (older
        versions). `rope_theta` is 10000 if the config does not state it.
        """
        parameters = {"rope_theta": self.number("rope_theta", 10000)}
        for field in ("rope_scaling", "rope_parameters"):
            values = self.values.get(field) or {}
            if not isinstance(values, dict):
                self._refuse(field, "an object or null")
            parameters |= values
        return parameters

    @property
    def scaling(self) -> str:
        """Scaling of rotary frequencies: `default`, `llama3`, …"""
        return str(self.rotary.get("rope_type") or self.rotary.get("type") or "default")

    @property
    def glm_rotary_fraction(self) -> float:
        """Fraction of a head that turns in GLM; 0.5 if the config does not state it."""
        fraction = self.rotary.get("partial_rotary_factor")
        return self.number("partial_rotary_factor", 0.5) if fraction is None else float(fraction)

    @property
    def sequence(self) -> int:
        """Sequence length that the model is planned with."""
        longest = self.maybe("max_position_embeddings") or self.maybe("n_positions") or 1024
        return min(_LONGEST, longest)

    def _refuse(self, field: str, valid_values: str) -> NoReturn:
        """Raise a ConfigError that names the file, the field, its value and the valid values."""
        shown_value = json.dumps(self.values[field])[:40]
        raise ConfigError(f"{self.path} has {field} = {shown_value}; use {valid_values}.")


def _refuse_unsupported(config: _Config) -> None:
    """Raise a ConfigError if the planner does not support the model.

    Unsupported are dense layers between layers with experts, and a sliding window shorter than the sequence
    (except in `_WINDOWED_KINDS`).
    """
    has_sparse_step = config.maybe("decoder_sparse_step") not in (None, 1)
    if has_sparse_step or config.has("mlp_only_layers"):
        raise ConfigError(
            f"{config.path} has dense layers between layers with experts (decoder_sparse_step, "
            "mlp_only_layers), which the planner does not support."
        )
    window = config.maybe("sliding_window")
    if config.values["model_type"] in _WINDOWED_KINDS:
        return
    uses_window = config.values.get("use_sliding_window", True)
    if window and uses_window and window < config.sequence:
        raise ConfigError(
            f"{config.path} has a sliding_window of {window}, but the planner supports full attention "
            "only; set sliding_window to null to plan full attention."
        )


def _gpt2(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a GPT-2 config."""
    hidden = config.whole("n_embd")
    activation = str(config.values.get("activation_function", "gelu_new"))
    activation_flag = _ACTIVATIONS.get(activation, TANH_GELU)
    ties_embeddings = config.values.get("tie_word_embeddings", True)
    return {
        "--num-layers": config.whole("n_layer"),
        "--hidden-size": hidden,
        "--ffn-hidden-size": config.maybe("n_inner") or 4 * hidden,
        "--num-attention-heads": config.whole("n_head"),
        "--seq-length": config.whole("n_positions"),
        "--max-position-embeddings": config.whole("n_positions"),
        "--vocab-size": config.whole("vocab_size"),
        "--hidden-dropout": config.number("resid_pdrop", 0.1),
        "--attention-dropout": config.number("attn_pdrop", 0.1),
        "--untie-embeddings-and-output-weights": not ties_embeddings,
        activation_flag: True,
        _EPSILON: _other_epsilon(config.number("layer_norm_epsilon", 1e-5)),
    }


def _llama(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a Llama config."""
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    groups = config.maybe("num_key_value_heads") or heads
    has_groups = groups != heads
    head_width = config.maybe("head_dim") or hidden // heads
    # Megatron derives the width of a head if the heads together are as wide as the hidden states.
    needs_head_width = head_width * heads != hidden
    is_scaled = config.scaling == "llama3"
    return {
        "--num-layers": config.whole("num_hidden_layers"),
        "--hidden-size": hidden,
        "--ffn-hidden-size": config.whole("intermediate_size"),
        "--num-attention-heads": heads,
        "--group-query-attention": has_groups,
        "--num-query-groups": groups if has_groups else None,
        "--kv-channels": head_width if needs_head_width else None,
        "--seq-length": config.sequence,
        "--max-position-embeddings": config.whole("max_position_embeddings"),
        "--position-embedding-type": "rope",
        "--rotary-base": int(config.rotary["rope_theta"]),
        "--use-rope-scaling": is_scaled,
        "--rope-scaling-factor": config.rotary["factor"] if is_scaled else None,
        "--normalization": "RMSNorm",
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--add-qkv-bias": config.has("attention_bias"),
        "--untie-embeddings-and-output-weights": not config.has("tie_word_embeddings"),
        "--hidden-dropout": 0,
        "--attention-dropout": config.number("attention_dropout", 0),
        "--vocab-size": config.whole("vocab_size"),
        _EPSILON: _other_epsilon(config.number("rms_norm_eps", 1e-6)),
    }


def _other_epsilon(value: float) -> float | None:
    """Return the epsilon of norms, or None if it is Megatron's default."""
    return None if value == _MEGATRONS_EPSILON else value


def _qwen3(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a Qwen3 config."""
    return {**_llama(config), "--qk-layernorm": True}


def _glm(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a GLM config, such as GLM-4-9B's.

    A part of each head turns, and neighbouring elements turn together. Fused rotary positions are switched off,
    because Megatron refuses them for such pairs with Transformer Engine before 2.3.
    """
    return {
        **_llama(config),
        "--add-qkv-bias": True,
        "--rotary-percent": config.glm_rotary_fraction,
        _INTERLEAVED: True,
        "--no-rope-fusion": True,
        _EPSILON: _other_epsilon(config.number("rms_norm_eps", 1.5625e-7)),
    }


def _experts(config: _Config, experts: str, columns: str) -> dict[str, object]:
    """Return the flags of a mixture of experts.

    Args:
        experts: Name of the config's field with the number of experts.
        columns: Name of the config's field with the width of an expert's MLP.
    """
    return {
        "--num-experts": config.whole(experts),
        "--moe-router-topk": config.whole("num_experts_per_tok"),
        "--moe-ffn-hidden-size": config.whole(columns),
        "--moe-aux-loss-coeff": config.number("router_aux_loss_coef", 0.001),
        "--moe-token-dispatcher-type": "alltoall",
    }


def _qwen2_moe(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a Qwen2-MoE config, which has routed experts and a gated shared expert."""
    return {
        **_llama(config),
        "--add-qkv-bias": True,
        **_experts(config, "num_experts", "moe_intermediate_size"),
        "--moe-shared-expert-intermediate-size": config.whole("shared_expert_intermediate_size"),
        "--moe-shared-expert-gate": True,
    }


def _gpt_oss(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a GPT-OSS config.

    Every other layer attends to a window of tokens. The activation function has an offset and is clamped. Fused
    rotary positions are switched off, because Megatron has no such kernel for YaRN (`rope_utils.py:
    apply_rotary_pos_emb`).
    """
    return {
        **_llama(config),
        **_experts(config, "num_local_experts", "intermediate_size"),
        "--swiglu": False,
        "--quick-geglu": True,
        "--glu-linear-offset": 1.0,
        "--activation-func-clamp-value": config.number("swiglu_limit", 7.0),
        "--disable-bias-linear": False,
        "--add-qkv-bias": False,
        "--softmax-type": "learnable",
        # Megatron does not count the token itself, and Hugging Face does.
        "--window-size": f"{config.whole('sliding_window') - 1},0",
        "--window-attn-skip-freq": 2,
        "--no-rope-fusion": True,
    }


def _deepseek_v3(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a DeepSeek V3 or Kimi K2 config.

    A number that the config lacks or states as 0 gives no flag, because Megatron's flag is then absent too.
    """
    return {
        **_qwen3(config),
        **_sigmoid_experts(config),
        "--multi-latent-attention": True,
        "--q-lora-rank": config.maybe("q_lora_rank"),
        "--kv-lora-rank": config.whole("kv_lora_rank"),
        "--qk-head-dim": config.whole("qk_nope_head_dim"),
        "--qk-pos-emb-head-dim": config.whole("qk_rope_head_dim"),
        "--v-head-dim": config.whole("v_head_dim"),
    }


def _sigmoid_experts(config: _Config) -> dict[str, object]:
    """Return the flags of DeepSeek V3's mixture of experts, which GLM 4.5 has too.

    The router scores experts by a sigmoid with a bias, the first layers are dense, and every token passes the shared
    experts.
    """
    layers = config.whole("num_hidden_layers")
    dense_layers = config.maybe("first_k_dense_replace", 0) or 0
    shared_experts = config.maybe("n_shared_experts", 0) or 0
    shared_width = shared_experts * config.whole("moe_intermediate_size")
    return {
        **_experts(config, "n_routed_experts", "moe_intermediate_size"),
        "--moe-shared-expert-intermediate-size": shared_width or None,
        "--moe-layer-freq": f"([0]*{dense_layers}+[1]*{layers - dense_layers})"
        if dense_layers
        else None,
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-num-groups": config.maybe("n_group", 0) or None,
        "--moe-router-group-topk": config.maybe("topk_group", 0) or None,
        "--mtp-num-layers": config.maybe("num_nextn_predict_layers", 0) or None,
    }


def _glm4_moe(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a GLM 4.5 config."""
    return {
        **_llama(config),
        **_sigmoid_experts(config),
        "--qk-layernorm": config.has("use_qk_norm"),
        "--rotary-percent": config.glm_rotary_fraction,
    }


def _minimax_m2(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a MiniMax M2 config, without its modules of multi-token prediction."""
    return {
        **_llama(config),
        **_experts(config, "num_local_experts", "intermediate_size"),
        "--qk-layernorm": config.has("use_qk_norm"),
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": config.has("use_routing_bias"),
    }


def _gemma3(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for the language model of a Gemma 3 config.

    Configs of models that read images have the language model in `text_config`, and leave out what equals the
    defaults of `transformers`. In every sixth layer a token attends to all tokens. Megatron has no flag for a gated
    GELU: SwiGLU has the same matrices.
    """
    text = _Config(
        config.path, {**_GEMMA_DEFAULTS, **(config.values.get("text_config") or config.values)}
    )
    pattern = text.maybe("sliding_window_pattern") or text.maybe("_sliding_window_pattern") or 6
    rotary_base = int(text.number("rope_theta", 1_000_000))
    return {
        **_llama(text),
        "--rotary-base": rotary_base,
        "--qk-layernorm": True,
        "--window-size": f"{text.whole('sliding_window') - 1},0",
        "--window-attn-skip-freq": pattern,
    }


_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Fields of `Gemma3TextConfig` of transformers 4.57 that published configs leave out."""


def _nemotron_h(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a Nemotron-H or Nemotron 3 config.

    These hybrids have blocks of Mamba-2, attention, MLPs and experts.
    """
    blocks = str(config.values["hybrid_override_pattern"])
    experts: dict[str, object] = {}
    if "E" in blocks:
        experts = {
            **_experts(config, "n_routed_experts", "moe_intermediate_size"),
            "--moe-shared-expert-intermediate-size": config.maybe(
                "moe_shared_expert_intermediate_size", 0
            )
            or None,
            "--moe-latent-size": config.maybe("moe_latent_size", 0) or None,
            "--moe-router-score-function": "sigmoid",
        }
    head_width = config.maybe("head_dim") or config.whole("attention_head_dim")
    return {
        **_llama(config),
        **experts,
        "--num-layers": len(blocks),
        "--kv-channels": head_width,
        "--position-embedding-type": "none",
        "--rotary-base": None,
        "--swiglu": False,
        "--squared-relu": True,
        "--hybrid-layer-pattern": blocks,
        "--mamba-num-heads": config.whole("mamba_num_heads"),
        "--mamba-head-dim": config.whole("mamba_head_dim"),
        "--mamba-num-groups": config.whole("n_groups"),
        "--mamba-state-dim": config.whole("ssm_state_size"),
    }


def _qwen3_next(config: _Config) -> dict[str, object]:
    """Return Megatron's flags for a Qwen3-Next config, whose parameters are counted and whose time is not."""
    return {
        **_qwen3(config),
        **_experts(config, "num_experts", "moe_intermediate_size"),
        "--attention-output-gate": True,
        "--moe-shared-expert-intermediate-size": config.whole("shared_expert_intermediate_size"),
        "--moe-shared-expert-gate": True,
        "--experimental-attention-variant": "gated_delta_net",
        "--linear-attention-freq": config.maybe("full_attention_interval") or 4,
        "--linear-key-head-dim": config.whole("linear_key_head_dim"),
        "--linear-value-head-dim": config.whole("linear_value_head_dim"),
        "--linear-num-key-heads": config.whole("linear_num_key_heads"),
        "--linear-num-value-heads": config.whole("linear_num_value_heads"),
        "--linear-conv-kernel-dim": config.whole("linear_conv_kernel_dim"),
    }


_KINDS: Mapping[str, Callable[[_Config], dict[str, object]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "phi3": _llama,
    "smollm3": _llama,
    "qwen2": lambda config: {**_llama(config), "--add-qkv-bias": True},
    "qwen3": _qwen3,
    "glm": _glm,
    "mixtral": lambda config: (
        _llama(config) | _experts(config, "num_local_experts", "intermediate_size")
    ),
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": lambda config: (
        _qwen3(config) | _experts(config, "num_experts", "moe_intermediate_size")
    ),
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
}

_WINDOWED_KINDS = ("gpt_oss", "gemma3", "gemma3_text")
"""Model types in which flags of Megatron describe the layers that have a window."""


def list_unplanned_parts(path: Path) -> tuple[str, ...]:
    """Return the parts of a `config.json`'s model that the flags of `read_config_flags` leave out.

    Each part is a phrase, such as "the vision tower". The result is empty if the flags describe the full model.

    Raises:
        ConfigError: The file cannot be read.
    """
    config = read_config(path)
    kind = config["model_type"]
    parts = []
    if config.get("vision_config"):
        parts.append("the vision tower")
    if kind.startswith("gemma3"):
        parts.append("the norms after attention and after the MLP")
    if kind == "minimax_m2" and config.get("use_mtp"):
        parts.append("multi-token prediction")
    return tuple(parts)


Inexact = Iterator[tuple[str, Any, str]]
"""Fields of a config that Megatron's flags do not express: name, value, and the values that would
be exact.
"""


_NEEDED: Mapping[str, Mapping[str, bool | str | float]] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "phi3": {
        "hidden_act": "silu",
        "attention_bias": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "partial_rotary_factor": 1.0,
    },
    "smollm3": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen2": {"hidden_act": "silu"},
    "qwen3": {"hidden_act": "silu", "attention_bias": False},
    "glm": {"hidden_act": "silu", "attention_bias": True},
    "mixtral": {"hidden_act": "silu", "router_jitter_noise": 0.0},
    "qwen2_moe": {"hidden_act": "silu", "qkv_bias": True},
    "qwen3_moe": {"hidden_act": "silu", "attention_bias": False},
}
"""Fields that must have one value, by model type."""


_STATED: Mapping[str, tuple[str, ...]] = {
    "qwen3": ("head_dim",),
    "qwen3_moe": ("head_dim",),
    "glm": ("head_dim", "num_key_value_heads"),
}
"""Fields that must be present, by model type, because `transformers` takes other values without them than Llama's."""


def _inexact(config: _Config) -> Inexact:
    """Yield the fields of a config that Megatron's flags do not express."""
    kind = config.values["model_type"]
    for field, value in _NEEDED[kind].items():
        if config.values.get(field, value) != value:
            yield field, config.values[field], json.dumps(value)
    yield from _inexact_gpt2(config) if kind == "gpt2" else _inexact_llama(config)


def _inexact_gpt2(config: _Config) -> Inexact:
    """Yield the fields of a GPT-2 config that Megatron's flags do not express."""
    activation = config.values.get("activation_function", "gelu_new")
    if str(activation) not in _ACTIVATIONS:
        yield "activation_function", activation, " or ".join(_ACTIVATIONS)
    if config.values.get("resid_pdrop", 0.1) != config.values.get("embd_pdrop", 0.1):
        yield "embd_pdrop", config.values.get("embd_pdrop", 0.1), "resid_pdrop's value"


def _inexact_llama(config: _Config) -> Inexact:
    """Yield each field of a Llama config whose value Megatron's flags do not express.

    An entry has the field's name, its value, and a text that says which values can be expressed.
    """
    yield from _inexact_scaling(config)
    rotary, model_type = config.rotary, config.values["model_type"]
    base = rotary["rope_theta"]
    if base != int(base):
        yield "rope_theta", base, "a whole number"
    if model_type != "glm" and rotary.get("partial_rotary_factor", 1) != 1:
        yield "partial_rotary_factor", rotary["partial_rotary_factor"], "1"
    for field in _STATED.get(model_type, ()):
        if not config.has(field):
            yield field, None, "a config that states it"


def _inexact_scaling(config: _Config) -> Inexact:
    """Yield the fields of a scaling of rotary frequencies that Megatron's flags do not express."""
    rotary, scaling = config.rotary, config.scaling
    is_glm = config.values["model_type"] == "glm"
    known_scalings = ("default",) if is_glm else ("default", "llama3", "linear", "yarn")
    if scaling not in known_scalings:
        yield "rope_type", scaling, " or ".join(known_scalings)
    factor = rotary.get("factor", 1)
    if scaling == "linear" and factor != int(factor):
        yield "factor", factor, "a whole number"
    if scaling == "yarn":
        for field in ("attention_factor", "mscale", "mscale_all_dim"):
            if rotary.get(field) is not None:
                yield field, rotary[field], "a model without that field"
    if scaling == "llama3":
        for field, only_value in _SCALING.items():
            if rotary.get(field, only_value) != only_value:
                yield field, rotary[field], str(only_value)


_NO_COUNTERPART = {
    "--multi-latent-attention": "makes its attention latent",
    "--mtp-num-layers": "predicts several tokens",
    "--softmax-type": "changes its softmax",
    "--attention-output-gate": "gates its attention",
    "--squared-relu": "changes its activation",
    "--quick-geglu": "changes its activation",
    "--apply-layernorm-1p": "adds one to its norms' weights",
    "--window-size": "limits its attention",
    "--rotary-percent": "turns a part of each head alone",
    "--moe-latent-size": "projects tokens before they are routed",
    "--moe-layer-freq": "leaves some layers without experts",
    "--moe-router-enable-expert-bias": "balances experts by biases",
    "--moe-router-topk-scaling-factor": "scales the router's probabilities",
}
_SHARES_ARCHITECTURE = {"mistral": "llama", "phi3": "llama"}
"""Model types whose tensors and flags are those of another type."""
_INTERLEAVED = "--rotary-interleaved"
"""Flag with which neighbouring elements of a head turn together, and not those half a head apart."""
_NO_ROTARY = "--no-rope-freq"
"""Flag with a 1 for each layer without rotary positions, and a 0 for each other layer."""
_ROUTED = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Model types with experts whose weights are converted."""
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "glm": "GlmForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Classes of `transformers` by model type."""


def _differs_from_default(flags: Flags, name: str) -> bool:
    """Return True if a flag is present with another value than Megatron's default.

    A flag that is present without a value gives True, and so does a flag that the table of flags does not have.
    """
    if not flags.has(name):
        return False
    if name not in FLAGS or not flags.texts(name):
        return True
    value, default = flags.text(name), str(FLAGS[name].default)
    try:
        return float(value) != float(default)
    except ValueError:
        return value != default


def flags_model_type(model_type: str) -> str:
    """Return the model type that `build_config` gives a model of `model_type` by its flags."""
    return _SHARES_ARCHITECTURE.get(model_type, model_type)


def _refuse_mixture(flags: Flags, family: str, wanted: Mapping[str, bool]) -> None:
    """Raise a ConfigError if a flag is present that the family lacks, or absent although the family needs it.

    Args:
        family: Name of the family of models, for the error sentence.
        wanted: For each flag, True if the family needs the flag, and False if the family lacks it.
    """
    for flag, is_needed in wanted.items():
        if flags.has(flag) == is_needed:
            continue
        difference = f"lacks {flag}, which {family} has"
        if not is_needed:
            difference = f"has {flag}, which {family} lacks"
        raise ConfigError(f"The model {difference}, so no config.json describes the model.")


def _common_config(flags: Flags) -> dict[str, Any]:
    """Return the fields of `config.json` that all model types share.

    Raises:
        ConfigError: No model type combines this normalization with these positions.
    """
    normalization = flags.text("--normalization")
    positions, needed_normalization = "learned", "LayerNorm"
    if flags.text("--position-embedding-type") in ("rope", "yarn"):
        positions, needed_normalization = "rotary", "RMSNorm"
    if normalization != needed_normalization:
        raise ConfigError(
            f"--normalization {normalization} with {positions} positions is "
            "no type of model that is converted."
        )
    return {
        "vocab_size": flags.integer("--vocab-size"),
        "tie_word_embeddings": not flags.has("--untie-embeddings-and-output-weights"),
        "initializer_range": flags.number("--init-method-std"),
    }


def _gpt2_config(flags: Flags) -> dict[str, Any]:
    """Return the `config.json` of a GPT-2 model with these flags."""
    _refuse_mixture(
        flags,
        "GPT-2",
        {
            **dict.fromkeys(
                ("--swiglu", "--disable-bias-linear", "--group-query-attention"), False
            ),
            **dict.fromkeys(("--qk-layernorm", "--add-qkv-bias", "--num-experts"), False),
        },
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


def _find_rotary_type(flags: Flags) -> str:
    """Return the `model_type`, such as `llama`, of a model with rotary positions and these flags.

    Raises:
        ConfigError: No model type that can be converted has both QK norms and biases of Q, K and V, or turns
            neighbouring elements without such biases.
    """
    has_query_norm, has_bias = flags.has("--qk-layernorm"), flags.has("--add-qkv-bias")
    has_experts = flags.has("--num-experts")
    is_plain = not (has_query_norm or has_bias or has_experts)
    if flags.has(_INTERLEAVED):
        if not has_bias or has_query_norm or has_experts or flags.has(_NO_ROTARY):
            raise ConfigError(
                f"{_INTERLEAVED} is converted for GLM alone, which has --add-qkv-bias and neither "
                f"--qk-layernorm nor experts; {MEGATRON_BRIDGE}."
            )
        return "glm"
    if flags.has(_NO_ROTARY) and is_plain:
        return "smollm3"
    if has_query_norm and has_bias:
        raise ConfigError(
            "--qk-layernorm with --add-qkv-bias is no type of model that is converted; "
            f"{MEGATRON_BRIDGE}."
        )
    if has_query_norm:
        return "qwen3_moe" if has_experts else "qwen3"
    if has_bias:
        return "qwen2_moe" if has_experts else "qwen2"
    return "mixtral" if has_experts else "llama"


def _rotary_config(flags: Flags) -> dict[str, Any]:
    """Return the `config.json` of a model with rotary positions and these flags."""
    model_type = _find_rotary_type(flags)
    _refuse_other_flags(flags, model_type)
    heads, hidden = flags.integer("--num-attention-heads"), flags.integer("--hidden-size")
    config = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "num_hidden_layers": flags.integer("--num-layers"),
        "hidden_size": hidden,
        "intermediate_size": flags.integer("--ffn-hidden-size"),
        "num_attention_heads": heads,
        "num_key_value_heads": flags.integer("--num-query-groups", heads),
        "head_dim": flags.integer("--kv-channels", hidden // heads),
        "max_position_embeddings": flags.integer("--max-position-embeddings"),
        "rope_theta": float(flags.integer("--rotary-base")),
    }
    scaling = _rotary_scaling(flags)
    if scaling:
        config["rope_scaling"] = scaling
    config |= {
        "rms_norm_eps": flags.number(_EPSILON),
        "hidden_act": "silu",
        "attention_dropout": flags.number("--attention-dropout"),
        **_common_config(flags),
    }
    if model_type in ("llama", "smollm3", "qwen3", "qwen3_moe"):
        config["attention_bias"] = False
    if model_type in ("llama", "smollm3"):
        config["mlp_bias"] = False
    if model_type == "glm":
        config["attention_bias"] = True
        config["partial_rotary_factor"] = flags.number("--rotary-percent", 1)
        # The type's default is a token of GLM's own vocabulary.
        config["pad_token_id"] = None
    if model_type == "smollm3":
        skips = re.findall("[01]", flags.text(_NO_ROTARY))
        config["no_rope_layers"] = [1 if skip == "0" else 0 for skip in skips]
        # The type's default is a token of SmolLM3's own vocabulary.
        config["pad_token_id"] = None
    if model_type in _ROUTED:
        config |= _experts_config(flags, model_type)
    return config


def _refuse_other_flags(flags: Flags, model_type: str) -> None:
    """Raise a ConfigError if a flag is present that the model type lacks, or absent although the type needs it."""
    has_shared_expert = model_type == "qwen2_moe"
    wanted = {
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--moe-shared-expert-intermediate-size": has_shared_expert,
        "--moe-shared-expert-gate": has_shared_expert,
        _NO_ROTARY: model_type == "smollm3",
    }
    if model_type == "mixtral":
        wanted["--moe-router-pre-softmax"] = False
    _refuse_mixture(flags, _CLASSES[model_type].removesuffix("ForCausalLM"), wanted)


def _experts_config(flags: Flags, model_type: str) -> dict[str, Any]:
    """Return the fields of `config.json` that describe the experts of a model with these flags."""
    width = flags.integer("--moe-ffn-hidden-size", flags.integer("--ffn-hidden-size"))
    coefficient = flags.number("--moe-aux-loss-coeff")
    config: dict[str, Any] = {
        "num_experts_per_tok": flags.integer("--moe-router-topk"),
        "router_aux_loss_coef": coefficient,
        "output_router_logits": coefficient > 0,
    }
    experts = flags.integer("--num-experts")
    if model_type == "mixtral":
        return {**config, "num_local_experts": experts, "intermediate_size": width}
    config |= {
        "num_experts": experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": not flags.has("--moe-router-pre-softmax"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if model_type == "qwen2_moe":
        shared_width = flags.integer("--moe-shared-expert-intermediate-size")
        config |= {"shared_expert_intermediate_size": shared_width, "qkv_bias": True}
    return config


def _rotary_scaling(flags: Flags) -> dict[str, Any]:
    """Return the `rope_scaling` of a model with these flags. It is empty if the model has no scaling.

    Raises:
        ConfigError: `--mscale-all-dim` is not 0 with YaRN.
    """
    if flags.has("--use-rope-scaling"):
        factor = flags.number("--rope-scaling-factor")
        return {"rope_type": "llama3", "factor": factor, **_SCALING}
    if flags.has("--rotary-seq-len-interpolation-factor"):
        factor = flags.number("--rotary-seq-len-interpolation-factor")
        return {"rope_type": "linear", "factor": factor}
    if flags.text("--position-embedding-type") != "yarn":
        return {}
    if flags.number("--mscale-all-dim", 0) != 0:
        raise ConfigError(f"--mscale-all-dim changes its attention; {MEGATRON_BRIDGE}.")
    original = flags.integer("--yarn-original-max-position-embeddings", 4096)
    return {
        "rope_type": "yarn",
        "factor": flags.number("--rotary-scaling-factor", 1),
        "original_max_position_embeddings": original,
        "beta_fast": flags.number("--yarn-beta-fast", 32),
        "beta_slow": flags.number("--yarn-beta-slow", 1),
        "truncate": not flags.has("--no-yarn-correction-range-round-to-int"),
    }
