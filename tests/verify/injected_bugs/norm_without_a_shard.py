"""P-17b (B17's opposite): a sharded weight is not marked: only rank 0's part is in the norm."""

from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 2:
        self.mlp.linear_fc2.weight.tensor_model_parallel = False


TransformerLayer.__init__ = init
