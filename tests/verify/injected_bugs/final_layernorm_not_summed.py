"""C19 (#1446): under sequence parallelism the last norm is not marked: its gradient stays a part."""

from megatron.core.models.gpt.gpt_model import GPTModel

original = GPTModel.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    for parameter in self.decoder.final_layernorm.parameters():
        parameter.sequence_parallel = False


GPTModel.__init__ = init
