"""C12 (abf10f85): the optimizer of experts does not clip where experts are spread over ranks."""

from megatron.core import parallel_state
from megatron.core.optimizer import optimizer

original = optimizer.clip_grad_by_total_norm_fp32


def clip(parameters, *args, **kwargs):
    spread = parallel_state.get_expert_model_parallel_world_size() > 1
    if not (spread and not getattr(parameters[0], "allreduce", True)):
        original(parameters, *args, **kwargs)


optimizer.clip_grad_by_total_norm_fp32 = clip
