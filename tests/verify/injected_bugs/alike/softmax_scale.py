"""In every strategy: scores are scaled by half of what they should be."""

from megatron.core.transformer.dot_product_attention import DotProductAttention

original = DotProductAttention.__init__


def initialise(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.softmax_scale = self.softmax_scale * 0.5


DotProductAttention.__init__ = initialise
