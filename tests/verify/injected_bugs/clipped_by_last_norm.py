"""With data parallelism gradients are clipped by the norm of the step before."""

from megatron.core import parallel_state
from megatron.core.optimizer import optimizer

original = optimizer.clip_grad_by_total_norm_fp32
last = {}


def clip(parameters, max_norm, total_norm, *args, **kwargs):
    norm = (
        last.get(0, total_norm) if parallel_state.get_data_parallel_world_size() > 1 else total_norm
    )
    last[0] = total_norm
    original(parameters, max_norm, norm, *args, **kwargs)


optimizer.clip_grad_by_total_norm_fp32 = clip
