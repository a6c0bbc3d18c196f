"""bigcode #35/#39: the gradient that attention passes back is not summed over the TP ranks."""

from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 2:
        linear = self.self_attention.linear_qkv
        linear.allreduce_dgrad, linear.disable_grad_reduce = False, True


TransformerLayer.__init__ = init
