"""The gradient norm is that of a rank's own part: the sum of squares over the ranks is left out."""

import torch
from megatron.core.optimizer import optimizer

original = optimizer.get_grad_norm_fp32
alone = []


def norm(gradients, norm_type=2, grad_stats_parallel_group=None):
    if not alone:
        ranks = range(torch.distributed.get_world_size())
        alone.append(torch.distributed.new_subgroups_by_enumeration([[rank] for rank in ranks])[0])
    return original(gradients, norm_type, alone[0])


optimizer.get_grad_norm_fp32 = norm
