"""The last pipeline stage's layer norms have an epsilon of 1e-6, not the configured 1e-5."""

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if parallel_state.get_pipeline_model_parallel_rank() > 0:
        self.input_layernorm.eps = self.pre_mlp_layernorm.eps = 1e-6


TransformerLayer.__init__ = init
