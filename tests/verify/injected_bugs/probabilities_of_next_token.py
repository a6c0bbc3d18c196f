"""Expert parallelism: after the exchange a token has the probability of the one before it."""

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

original = MoEAlltoAllTokenDispatcher.token_dispatch


def dispatch(self, *args, **kwargs):
    tokens, probs = original(self, *args, **kwargs)
    return tokens, probs.roll(1, 0) if self.ep_size > 1 else probs


MoEAlltoAllTokenDispatcher.token_dispatch = dispatch
