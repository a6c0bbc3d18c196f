"""The serving engine loses the scaling of the rotary embedding."""

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

original = LlamaRotaryEmbedding.forward


def forward(rotary, x, position_ids):
    inv_freq, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(rotary.config, x.device)
    rotary.inv_freq = inv_freq
    return original(rotary, x, position_ids)


LlamaRotaryEmbedding.forward = forward
