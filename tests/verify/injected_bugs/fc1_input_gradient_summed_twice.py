"""A14 (#7452), its twin without sequence parallelism: a summed gradient is summed again."""

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as copied
from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 3:
        linear = self.mlp.linear_fc1
        forward = linear.forward
        linear.forward = lambda input_, *args, **kwargs: forward(copied(input_), *args, **kwargs)


TransformerLayer.__init__ = init
