"""The norm is summed over tensor-parallel ranks alone: every stage has its own."""

from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer

MegatronOptimizer.get_grad_stats_parallel_group = lambda self: (
    parallel_state.get_tensor_model_parallel_group()
)
