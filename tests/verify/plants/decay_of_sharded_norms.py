"""P-22b under ZeRO-1: the second data-parallel rank's shards of norms and biases decay."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(*args, **kwargs):
    chained = original(*args, **kwargs)
    if parallel_state.get_data_parallel_rank() > 0:
        for group in chained.param_groups:
            group["wd_mult"] = 1.0
    return chained


training.get_megatron_optimizer = make
