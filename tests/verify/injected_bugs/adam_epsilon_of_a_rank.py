"""The second tensor-parallel rank's Adam has an epsilon of 1e-5 instead of 1e-8."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(*args, **kwargs):
    chained = original(*args, **kwargs)
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        for group in chained.param_groups:
            group["eps"] = 1e-5
    return chained


training.get_megatron_optimizer = make
