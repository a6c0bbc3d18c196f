"""C6 (!2824): what comes from other ranks is not sorted by expert, so tokens reach wrong experts."""

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

original = MoEAlltoAllTokenDispatcher.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.sort_input_by_local_experts = torch.arange(self.num_experts * self.tp_size)


MoEAlltoAllTokenDispatcher.__init__ = init
