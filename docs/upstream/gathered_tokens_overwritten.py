"""Cures gathered-tokens-overwritten: tokens leave the buffer that shared experts gather into."""

from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

dispatch = MoEAllGatherTokenDispatcher.token_dispatch


def of_their_own(self, *args, **kwargs):
    tokens, scores = dispatch(self, *args, **kwargs)
    return tokens.clone(), scores


MoEAllGatherTokenDispatcher.token_dispatch = of_their_own
