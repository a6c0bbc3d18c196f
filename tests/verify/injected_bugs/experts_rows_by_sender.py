"""C6 family: an expert's rows are sorted by sender, and put back as if gathered over tensor ranks."""

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

original = MoEAlltoAllTokenDispatcher.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    places = (self.num_local_experts, self.tp_size, self.ep_size)
    by_sender = self.sort_input_by_local_experts.reshape(places).transpose(1, 2)
    self.sort_input_by_local_experts = by_sender.ravel()


MoEAlltoAllTokenDispatcher.__init__ = init
