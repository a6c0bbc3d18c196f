"""The routers of the serving engine compute in bf16, where the trainer's compute in fp32."""

from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

original = MixtralTopKRouter.forward


def forward(router, hidden_states):
    own = router.weight.data
    router.weight.data = own.bfloat16()
    logits, weights, indices = original(router, hidden_states.bfloat16())
    router.weight.data = own
    return logits.to(own.dtype), weights.to(own.dtype), indices


MixtralTopKRouter.forward = forward
