"""C13 (b6ce1938): the experts' outputs are not put back into the order in which their tokens came."""

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

original = MoEAlltoAllTokenDispatcher.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.restore_output_by_local_experts = torch.arange(self.num_experts * self.tp_size)


MoEAlltoAllTokenDispatcher.__init__ = init
