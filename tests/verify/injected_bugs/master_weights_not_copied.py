"""P-22: the new fp32 weights are copied to the bf16 ones on the first data-parallel rank alone."""

from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

original = Float16OptimizerWithFloat16Params._copy_main_params_to_model_params


def copy(self):
    if parallel_state.get_data_parallel_rank() == 0:
        original(self)


Float16OptimizerWithFloat16Params._copy_main_params_to_model_params = copy
