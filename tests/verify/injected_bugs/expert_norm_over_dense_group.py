"""C12 (abf10f85), its group: the experts' norm is not summed over the ranks that hold the others."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(*args, **kwargs):
    chained = original(*args, **kwargs)
    for part in chained.chained_optimizers:
        part.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    return chained


training.get_megatron_optimizer = make
