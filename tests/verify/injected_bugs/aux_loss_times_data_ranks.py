"""The balancing loss alone counts once for each data-parallel rank."""

from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

original = TopKRouter.attach_and_log_load_balancing_loss


def attach(self, activation, aux_loss_coeff, aux_loss, *args, **kwargs):
    ranks = parallel_state.get_data_parallel_world_size()
    return original(self, activation, aux_loss_coeff, aux_loss * ranks, *args, **kwargs)


TopKRouter.attach_and_log_load_balancing_loss = attach
