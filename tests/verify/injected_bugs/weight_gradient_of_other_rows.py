"""TTrace's overlap bug: a weight's gradient is made with a gathered input whose order is wrong."""

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 2 and parallel_state.get_tensor_model_parallel_world_size() > 1:
        self.mlp.linear_fc1.weight.register_hook(lambda gradient: gradient.roll(1, 0))


TransformerLayer.__init__ = init
