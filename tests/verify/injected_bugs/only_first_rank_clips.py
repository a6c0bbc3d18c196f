"""C12's family: the clip factor is applied on the first tensor-parallel rank alone."""

from megatron.core import parallel_state
from megatron.core.optimizer import optimizer

original = optimizer.clip_grad_by_total_norm_fp32


def clip(*args, **kwargs):
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        original(*args, **kwargs)


optimizer.clip_grad_by_total_norm_fp32 = clip
