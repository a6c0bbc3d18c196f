"""The squares in the gradient norm are summed over the ranks twice."""

import torch
from megatron.core.optimizer import optimizer

original = optimizer.get_grad_norm_fp32


def norm(gradients, norm_type=2, grad_stats_parallel_group=None):
    ranks = torch.distributed.get_world_size(grad_stats_parallel_group)
    return original(gradients, norm_type, grad_stats_parallel_group) * ranks**0.5


optimizer.get_grad_norm_fp32 = norm
