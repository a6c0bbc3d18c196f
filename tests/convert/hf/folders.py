"""Configs of models that are small enough for hundreds of conversions."""

from typing import Any

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

DENSE = {**LLAMA, "hidden_act": "silu"}
EXPERTS = {
    **DENSE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {**DENSE, "model_type": "mistral", "sliding_window": None},
    "phi3": {
        **DENSE,
        "model_type": "phi3",
        "sliding_window": None,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
    },
    "smollm3": {
        **DENSE,
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
    },
    "glm": {
        **DENSE,
        "model_type": "glm",
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "qwen2": {**DENSE, "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {**DENSE, "model_type": "qwen3", "head_dim": 6, "attention_bias": False},
    "mixtral": {
        **DENSE,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen2_moe": {
        **EXPERTS,
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 10,
    },
    "qwen3_moe": {**EXPERTS, "model_type": "qwen3_moe", "head_dim": 6, "attention_bias": False},
    "llama-linear": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-yarn": {**LLAMA, "max_position_embeddings": 64, "rope_scaling": YARN},
}
"""A config per family beside GPT-2 and Llama, and per scaling of rotary frequencies beside Llama 3's."""
