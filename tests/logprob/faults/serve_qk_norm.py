"""The serving engine leaves the norms of queries and keys out."""

import sys

import torch

serve = sys.modules["__main__"]
original = serve.load_model


def load_model(*arguments):
    model = original(*arguments)
    for layer in model.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    return model


serve.load_model = load_model
