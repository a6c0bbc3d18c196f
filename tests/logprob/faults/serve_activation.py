"""The serving engine has the exact GELU, where the trainer has the approximation with tanh."""

import sys

import torch

serve = sys.modules["__main__"]
original = serve.load_model


def load_model(*arguments):
    model = original(*arguments)
    for block in model.transformer.h:
        block.mlp.act = torch.nn.GELU()
    return model


serve.load_model = load_model
