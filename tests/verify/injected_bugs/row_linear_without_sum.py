"""P-2: one row-parallel linear leaves out its all-reduce, so each rank keeps its own part of the sum."""

from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 2:
        self.mlp.linear_fc2.explicit_expert_comm = True


TransformerLayer.__init__ = init
