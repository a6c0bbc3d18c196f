"""Under tensor parallelism, layer 1's norm is half as large again in the second micro batch, on all ranks."""

from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

original = TransformerLayer.__init__
MICRO_BATCHES = 3


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.layer_number == 2 and parallel_state.get_tensor_model_parallel_world_size() > 1:
        self.input_layernorm.register_forward_hook(hook)


def hook(module, inputs, output):
    number = getattr(module, "forwards", 0)
    module.forwards = number + 1
    return output * 1.5 + 0.1 if number % MICRO_BATCHES == 1 else output


TransformerLayer.__init__ = init
