"""Cures tokens-ahead-by-context-rank: MTP divides by the mean number of tokens of the context ranks."""

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction as module

roll = module.roll_tensor


def rolled(tensor, *args, cp_group=None, **kwargs):
    moved, total = roll(tensor, *args, cp_group=cp_group, **kwargs)
    if cp_group is not None and cp_group.size() > 1 and total.is_floating_point():  # The loss mask.
        total = total.clone()
        torch.distributed.all_reduce(total, group=cp_group)
        total = total / cp_group.size()  # Gradients are averaged over these ranks.
    return moved, total


module.roll_tensor = rolled
if hasattr(gpt_model, "roll_tensor"):  # Up to 0.16 the model divides by itself.
    gpt_model.roll_tensor = rolled
