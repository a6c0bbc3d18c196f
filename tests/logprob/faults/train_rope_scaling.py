"""The trainer loses the scaling of the rotary embedding."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

original = RotaryEmbedding.__init__


def initialize(rotary, *arguments, **options):
    original(rotary, *arguments, **{**options, "rope_scaling": False})


RotaryEmbedding.__init__ = initialize
