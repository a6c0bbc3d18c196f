"""Only the last stage gives the balancing loss the scale of a micro batch."""

import sys

from megatron.core import parallel_state

schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
original = schedules.MoEAuxLossAutoScaler.set_loss_scale


def scale(value):
    if parallel_state.is_pipeline_last_stage():
        original(value)


schedules.MoEAuxLossAutoScaler.set_loss_scale = staticmethod(scale)
