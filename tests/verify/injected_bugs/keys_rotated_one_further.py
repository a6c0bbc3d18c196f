"""On tensor-parallel ranks after the first, keys are rotated by the position before theirs."""

import sys

from megatron.core import parallel_state

attention = sys.modules["megatron.core.transformer.attention"]
original = attention.apply_rotary_pos_emb


def rotate(t, freqs, config, **kwargs):
    if (
        parallel_state.get_tensor_model_parallel_rank() > 0 and t.shape[-2] == 1
    ):  # one key head, two query heads
        freqs = freqs.roll(1, 0)
    return original(t, freqs, config, **kwargs)


attention.apply_rotary_pos_emb = rotate
