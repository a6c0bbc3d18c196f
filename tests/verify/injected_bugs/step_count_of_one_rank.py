"""P-29's way: one data-parallel rank's Adam is a step ahead, so its bias correction differs."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(*args, **kwargs):
    chained = original(*args, **kwargs)
    if parallel_state.get_data_parallel_rank() > 0:
        for part in chained.chained_optimizers:
            part.optimizer.register_step_pre_hook(ahead)
    return chained


def ahead(adam, args, kwargs):
    for state in adam.state.values():
        if int(state["step"]) == 1:
            state["step"] = state["step"] + 1


training.get_megatron_optimizer = make
