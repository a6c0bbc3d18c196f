"""The norms of the serving engine compute in bf16, where the trainer's compute in fp32."""

from transformers.models.llama.modeling_llama import LlamaRMSNorm

original = LlamaRMSNorm.forward


def forward(norm, hidden_states):
    rounded = hidden_states.bfloat16()
    variance = rounded.pow(2).mean(-1, keepdim=True)
    scaled = rounded * (variance + norm.variance_epsilon).rsqrt()
    return (norm.weight.bfloat16() * scaled).to(hidden_states.dtype)


LlamaRMSNorm.forward = forward
