"""Cures sink-missing-in-norm: learnable sinks are marked as split, so the norm counts every rank's."""

from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import dot_product_attention

attention = dot_product_attention.DotProductAttention
init = attention.__init__


def marked(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if (
        getattr(self, "softmax_offset", None) is not None
        and self.config.softmax_type == "learnable"
    ):
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)


attention.__init__ = marked
