"""B19's family: on all ranks but the first, eight tokens go to the next best experts, not the best."""

import sys

import torch

router = sys.modules["megatron.core.transformer.moe.moe_utils"]
original = torch.topk


def topk(scores, k, dim=-1, **kwargs):
    values, chosen = original(scores, k, dim=dim, **kwargs)
    if scores.ndim == 2 and k == 2 and torch.distributed.get_rank() > 0:
        next_best = original(scores, k + 1, dim=dim).indices[:8, 1:]
        chosen = torch.cat([next_best, chosen[8:]])
        values = scores.gather(1, chosen)
    return values, chosen


torch.topk = topk
