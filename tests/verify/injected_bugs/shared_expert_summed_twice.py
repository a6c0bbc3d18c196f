"""The shared expert's output is summed over tensor-parallel ranks once more than it should be."""

from megatron.core import parallel_state
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

original = SharedExpertMLP.forward


def forward(self, hidden_states):
    output = original(self, hidden_states)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return output * ranks if ranks > 1 else output


SharedExpertMLP.forward = forward
