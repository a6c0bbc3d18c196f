"""Under tensor parallelism layer 2's attention residual is 1.01 of itself."""

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 3 and parallel_state.get_tensor_model_parallel_world_size() > 1:
        make = self.self_attn_bda

        def bda(*a, **k):
            add = make(*a, **k)
            return lambda x, residual, p: add(x, residual * 1.01, p)

        self.self_attn_bda = bda


TransformerLayer.__init__ = init
