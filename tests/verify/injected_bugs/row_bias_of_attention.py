"""Under tensor parallelism the MLP of layer 1 adds the bias of the attention's projection, not its own."""

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 2 and parallel_state.get_tensor_model_parallel_world_size() > 1:
        forward, bias = self.mlp.linear_fc2.forward, self.self_attention.linear_proj.bias
        self.mlp.linear_fc2.forward = lambda hidden: (forward(hidden)[0], bias)


TransformerLayer.__init__ = init
