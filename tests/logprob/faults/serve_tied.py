"""The serving engine ties the output layer to the embedding, where the trainer has two matrices."""

import sys

serve = sys.modules["__main__"]
original = serve.load_model


def load_model(*arguments):
    model = original(*arguments)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


serve.load_model = load_model
