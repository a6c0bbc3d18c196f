"""The trainer's routers have a bias, which the serving engine does not get."""

import torch
from megatron.core.transformer.moe.router import TopKRouter

original = TopKRouter.__init__


def initialize(router, *arguments, **options):
    original(router, *arguments, **options)
    generator = torch.Generator().manual_seed(1)
    bias = 0.2 * torch.randn(router.config.num_moe_experts, generator=generator)
    del router.expert_bias
    router.register_buffer("expert_bias", bias, persistent=False)


TopKRouter.__init__ = initialize
