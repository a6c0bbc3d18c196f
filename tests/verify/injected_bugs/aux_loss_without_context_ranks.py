"""C10 (#2237): the scale of auxiliary losses lacks the number of context-parallel ranks."""

from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

original = MoEAuxLossAutoScaler.set_loss_scale


def scale(value):
    original(value / parallel_state.get_context_parallel_world_size())


MoEAuxLossAutoScaler.set_loss_scale = staticmethod(scale)
