"""The trainer's labels are one token further than the next token."""

import torch
from megatron.core.models.gpt import GPTModel

original = GPTModel.forward


def forward(model, *arguments, labels=None, **options):
    if labels is not None:
        labels = torch.roll(labels, -1, dims=1)
    return original(model, *arguments, labels=labels, **options)


GPTModel.forward = forward
