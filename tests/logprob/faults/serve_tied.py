"""The serving engine ties the output layer to the embedding, where the trainer has two matrices."""

import sys

import torch

serve = sys.modules["__main__"]
original = serve.load_model


def load_model(*arguments):
    model = original(*arguments)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


serve.load_model = load_model
