"""The output layer of the serving engine computes in bf16, where the trainer's computes in fp32."""

import sys

import torch

serve = sys.modules["__main__"]
original = serve.load_model


def load_model(*arguments):
    model = original(*arguments)
    head = model.lm_head

    def forward(hidden):
        product = torch.nn.functional.linear(hidden.bfloat16(), head.weight.bfloat16())
        return product.float()

    head.forward = forward
    return model


serve.load_model = load_model
