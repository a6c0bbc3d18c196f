"""bf16: a later tensor-parallel rank makes its fp32 weights anew from the bf16 ones after a step."""

from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Optimizer

original = Optimizer._copy_main_params_to_model_params


def copy(self):
    original(self)
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        for models, mains in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
            for model, main in zip(models, mains, strict=True):
                main.data.copy_(model.data)


Optimizer._copy_main_params_to_model_params = copy
