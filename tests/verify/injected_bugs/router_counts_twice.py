"""A router counts its tokens once more for every further rank of the experts' group."""

from megatron.core.parallel_state import get_expert_model_parallel_world_size
from megatron.core.transformer.moe.router import TopKRouter

original = TopKRouter._apply_expert_bias


def count(self, *args, **kwargs):
    for _ in range(get_expert_model_parallel_world_size()):
        original(self, *args, **kwargs)


TopKRouter._apply_expert_bias = count
