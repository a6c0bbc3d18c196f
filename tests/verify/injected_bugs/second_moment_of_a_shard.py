"""The second data-parallel rank's second moment decays by 0.999, not the configured 0.95."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(*args, **kwargs):
    chained = original(*args, **kwargs)
    if parallel_state.get_data_parallel_rank() > 0:
        for group in chained.param_groups:
            group["betas"] = (group["betas"][0], 0.999)
    return chained


training.get_megatron_optimizer = make
