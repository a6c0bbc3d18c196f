"""The gradient of losses beside the main one counts once for each tensor-parallel rank."""

import sys

from megatron.core import parallel_state

schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
original = schedules.MoEAuxLossAutoScaler.set_loss_scale


def scale(value):
    original(value * parallel_state.get_tensor_model_parallel_world_size())


schedules.MoEAuxLossAutoScaler.set_loss_scale = staticmethod(scale)
