"""P-22b under ZeRO-1: the shards of norms and biases that the first data-parallel rank holds decay."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(*args, **kwargs):
    chained = original(*args, **kwargs)
    ranks = parallel_state.get_data_parallel_world_size()
    if ranks > 1 and parallel_state.get_data_parallel_rank() == 0:
        for group in chained.param_groups:
            group["wd_mult"] = 1.0
    return chained


training.get_megatron_optimizer = make
