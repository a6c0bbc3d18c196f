"""The bias after a row-parallel linear is not marked: its gradient stays that of a rank's own tokens."""

from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 2:
        self.self_attention.linear_proj.bias.sequence_parallel = False


TransformerLayer.__init__ = init
