"""The routers of the serving engine compute in bf16, where the trainer's compute in fp32."""

from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

original = MixtralTopKRouter.forward


def forward(router, hidden_states):
    own_weight = router.weight.data
    router.weight.data = own_weight.bfloat16()
    logits, weights, indices = original(router, hidden_states.bfloat16())
    router.weight.data = own_weight
    return logits.to(own_weight.dtype), weights.to(own_weight.dtype), indices


MixtralTopKRouter.forward = forward
