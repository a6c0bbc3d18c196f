"""C20 (#599): the router's weight is not marked, so each rank learns from its own tokens alone."""

from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 1:
        self.mlp.router.weight.sequence_parallel = False


TransformerLayer.__init__ = init
