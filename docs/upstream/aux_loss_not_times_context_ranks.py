"""Cures aux-loss-not-times-context-ranks: gradients are averaged over the context-parallel ranks."""

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.training import get_args

set_scale = MoEAuxLossAutoScaler.set_loss_scale


def of_all_ranks(scale):
    by_token = get_args().calculate_per_token_loss
    set_scale(scale if by_token else scale * parallel_state.get_context_parallel_world_size())


MoEAuxLossAutoScaler.set_loss_scale = staticmethod(of_all_ranks)
