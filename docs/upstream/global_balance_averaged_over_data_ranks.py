"""Cures global-balance-averaged-over-data-ranks: each rank has its own tokens' part, to be summed."""

from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

coefficient = TopKRouter.get_aux_loss_coeff


def of_all_ranks(self, kind):
    own = coefficient(self, kind)
    ranks = parallel_state.get_data_parallel_world_size()
    return own * ranks if kind == "global_aux_loss" else own


TopKRouter.get_aux_loss_coeff = of_all_ranks
