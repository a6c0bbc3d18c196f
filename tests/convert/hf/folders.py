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
