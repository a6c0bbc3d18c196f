"""The serving engine loses the scaling of the rotary embedding."""

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

original = LlamaRotaryEmbedding.forward


def forward(rotary, x, position_ids):
    channels = 2 * len(rotary.inv_freq)
    rotary.inv_freq = 1.0 / 5e5 ** (torch.arange(0, channels, 2).float() / channels)
    return original(rotary, x, position_ids)


LlamaRotaryEmbedding.forward = forward
