"""A8's kin: a sharded bias is not marked, and its part on the other ranks is in no norm."""

from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 3:
        self.mlp.linear_fc1.bias.tensor_model_parallel = False


TransformerLayer.__init__ = init
