"""P-24: a pipeline stage runs on the buffer of the micro batch before, every second time."""

from megatron.core.models.gpt.gpt_model import GPTModel

original = GPTModel.set_input_tensor


def set_input(self, input_tensor):
    tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
    if tensor is not None:
        before, self.received = getattr(self, "received", None), tensor.detach().clone()
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2 == 0:
            tensor.data.copy_(before)
    original(self, input_tensor)


GPTModel.set_input_tensor = set_input
