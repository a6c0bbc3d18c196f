"""Cures ahead-recomputed-with-a-mask: MTP's recomputed layer gets the mask of padding, too."""

from functools import partial

from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

recompute = MultiTokenPredictionLayer._checkpointed_forward


def with_mask(self, *args, padding_mask=None, **kwargs):
    self._proj_and_transformer_layer = partial(
        type(self)._proj_and_transformer_layer, self, padding_mask=padding_mask
    )
    return recompute(self, *args, **kwargs)


MultiTokenPredictionLayer._checkpointed_forward = with_mask
