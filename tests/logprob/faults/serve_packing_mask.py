"""The serving engine loses the mask between the documents of a packed sequence, which the trainer has."""

from megatron.core.datasets import gpt_dataset

original = gpt_dataset._get_ltor_masks_and_position_ids


def make_causal_mask(data, eod_token, reset_position_ids, reset_attention_mask, *options):
    return original(data, eod_token, reset_position_ids, False, *options)


gpt_dataset._get_ltor_masks_and_position_ids = make_causal_mask
