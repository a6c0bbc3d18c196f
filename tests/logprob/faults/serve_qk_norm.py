"""The serving engine leaves the norms of queries and keys out."""

import sys

serve = sys.modules["__main__"]
original = serve.load_model


def load_model(*arguments):
    model = original(*arguments)
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = lambda hidden: hidden
    return model


serve.load_model = load_model
