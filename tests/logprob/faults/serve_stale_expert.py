"""One expert of the serving engine still has the weights of an earlier step."""

import sys

import torch

serve = sys.modules["__main__"]
original = serve.load_model


def load_model(*arguments):
    model = original(*arguments)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2] *= 0.9
    return model


serve.load_model = load_model
