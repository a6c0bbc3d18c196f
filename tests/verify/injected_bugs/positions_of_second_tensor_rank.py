"""The second tensor-parallel rank counts positions from one, between the model and its embedding."""

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

original = GPTModel.forward


def forward(self, input_ids, position_ids, *args, **kwargs):
    if parallel_state.get_tensor_model_parallel_rank() > 0 and position_ids is not None:
        position_ids = position_ids.roll(-1, -1)
    return original(self, input_ids, position_ids, *args, **kwargs)


GPTModel.forward = forward
