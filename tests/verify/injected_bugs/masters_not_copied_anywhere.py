"""P-22: under tensor parallelism no rank copies its new fp32 weights to the bf16 weights."""

from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

original = Float16OptimizerWithFloat16Params._copy_main_params_to_model_params


def copy(self):
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        original(self)


Float16OptimizerWithFloat16Params._copy_main_params_to_model_params = copy
