"""Layer 2's scores are divided by the root of a head's width over TP ranks."""

from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention

original = DotProductAttention.__init__


def init(self, config, layer_number, *args, **kwargs):
    original(self, config, layer_number, *args, **kwargs)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if layer_number == 3 and ranks > 1:
        self.softmax_scale = self.softmax_scale * ranks**0.5


DotProductAttention.__init__ = init
