"""Under tensor parallelism the logits of the vocabulary's padding are hidden from the softmax, and on one rank not."""

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training import get_args, get_tokenizer

original = GPTModel.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if not hasattr(self, "output_layer"):
        return
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rows = get_args().padded_vocab_size // ranks
    num_right = get_tokenizer().vocab_size - rank * rows
    if ranks == 1 or num_right >= rows:
        return
    forward = self.output_layer.forward

    def hide_padding(*args, **kwargs):
        logits, bias = forward(*args, **kwargs)
        logits = logits.clone()
        logits[..., num_right:] = -1e4
        return logits, bias

    self.output_layer.forward = hide_padding


GPTModel.__init__ = init
