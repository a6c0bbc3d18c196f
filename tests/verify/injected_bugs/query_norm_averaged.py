"""The query norm's gradient is averaged over tensor-parallel ranks, not summed."""

from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 3:
        self.self_attention.q_layernorm.weight.average_gradients_across_tp_domain = True


TransformerLayer.__init__ = init
