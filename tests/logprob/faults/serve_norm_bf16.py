"""The norms of the serving engine take and give bf16, where the trainer's compute in fp32."""

from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def forward(norm, hidden_states):
    weight = norm.weight.bfloat16()
    rounded = rms_norm(hidden_states.bfloat16(), weight.shape, weight, norm.variance_epsilon)
    return rounded.to(hidden_states.dtype)


LlamaRMSNorm.forward = forward
