"""The serving engine has the rotary base 1e6, where the trainer has the model's own_weight."""

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

original = Qwen3RotaryEmbedding.forward


def forward(rotary, x, position_ids):
    channels = 2 * len(rotary.inv_freq)
    rotary.inv_freq = 1.0 / 1e6 ** (torch.arange(0, channels, 2).float() / channels)
    return original(rotary, x, position_ids)


Qwen3RotaryEmbedding.forward = forward
