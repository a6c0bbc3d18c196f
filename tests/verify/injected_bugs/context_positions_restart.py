"""CP's positions: each rank numbers its own tokens from 0, as if they were the whole sequence."""

import torch
from megatron.core import utils

original = utils.get_batch_on_this_cp_rank


def split(batch, *args, cp_group=None, **kwargs):
    batch = original(batch, *args, cp_group=cp_group, **kwargs)
    if cp_group.size() > 1:
        positions = batch["position_ids"]
        batch["position_ids"] = torch.arange(positions.size(1)).expand_as(positions).contiguous()
    return batch


utils.get_batch_on_this_cp_rank = split
