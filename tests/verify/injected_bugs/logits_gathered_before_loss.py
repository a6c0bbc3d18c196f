"""A2 (#7452): the output layer gathers its logits, and the loss still takes them for a part."""

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

original = GPTModel.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if hasattr(self, "output_layer"):
        # On one rank autograd refuses the gathered logits aloud, as a view that is changed in place.
        self.output_layer.gather_output = parallel_state.get_tensor_model_parallel_world_size() > 1


GPTModel.__init__ = init
