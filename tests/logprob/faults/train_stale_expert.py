"""The experts of the second expert-parallel rank have the weights of an earlier step."""

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel

original = GPTModel.forward


def forward(model, *arguments, **options):
    if mpu.get_expert_model_parallel_rank() == 1 and not hasattr(model, "is_stale"):
        model.is_stale = True
        for name, parameter in model.named_parameters():
            if "experts" in name and "fc2" in name:
                with torch.no_grad():
                    parameter.mul_(0.9)
    return original(model, *arguments, **options)


GPTModel.forward = forward
