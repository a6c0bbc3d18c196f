"""The trainer loses the scaling of the rotary embedding."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

RotaryEmbedding._apply_scaling = lambda rotary, frequencies, **_: frequencies
