"""The trainer's routers have a bias, which only the trainer gets."""

import torch
from megatron.core.transformer.moe.router import TopKRouter

original = TopKRouter.routing


def routing(router, *arguments, **options):
    if router.expert_bias is not None and not router.expert_bias.any():
        generator = torch.Generator().manual_seed(router.layer_number)
        router.expert_bias.copy_(0.2 * torch.randn(len(router.expert_bias), generator=generator))
    return original(router, *arguments, **options)


TopKRouter.routing = routing
