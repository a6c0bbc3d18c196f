"""P-22b: norms and biases decay on the last tensor-parallel rank, not on the first."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(*args, **kwargs):
    chained = original(*args, **kwargs)
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        for group in chained.param_groups:
            group["wd_mult"] = 1.0
    return chained


training.get_megatron_optimizer = make
