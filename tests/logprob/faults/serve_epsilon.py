"""The serving engine has the epsilon 1e-5 in its norms, where the trainer has 1e-6."""

from transformers.models.llama.modeling_llama import LlamaRMSNorm

original = LlamaRMSNorm.forward


def forward(norm, hidden_states):
    norm.variance_epsilon = 1e-5
    return original(norm, hidden_states)


LlamaRMSNorm.forward = forward
