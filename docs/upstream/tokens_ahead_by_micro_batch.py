"""Cures tokens-ahead-by-micro-batch: a token ahead weighs the same in every micro batch.

With a loss by token it weighs one over the tokens of the whole batch, as every token does. What #3159
wanted beside that, the share of tokens ahead among all, would be one number of the whole batch too;
it is left out here. The logged MTP loss is divided by the same number.
"""

from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction as module

process, roll = module.process_mtp_loss, module.roll_tensor


def with_one_weight(*args, loss_mask, config, **kwargs):
    tokens = loss_mask.sum()

    def rolled(tensor, *args, **kwargs):
        moved, total = roll(tensor, *args, **kwargs)
        return moved, tokens if tensor.is_floating_point() else total

    if config.calculate_per_token_loss:
        module.roll_tensor = rolled
    try:
        return process(*args, loss_mask=loss_mask, config=config, **kwargs)
    finally:
        module.roll_tensor = roll


gpt_model.process_mtp_loss = with_one_weight
