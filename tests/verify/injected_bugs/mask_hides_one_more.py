"""A later pipeline stage's attention does not see the token before a query's own."""

import sys

from megatron.core import parallel_state

dot = sys.modules["megatron.core.transformer.dot_product_attention"]
softmax = dot.FusedScaleMaskSoftmax
original = softmax.forward


def forward(self, input, mask, *args, **kwargs):
    if parallel_state.get_pipeline_model_parallel_rank() > 0:
        lower = input.new_ones(input.shape[-2:], dtype=bool).tril(-1).triu(-1)
        input = input.masked_fill(lower, -10000.0)
    return original(self, input, mask, *args, **kwargs)


softmax.forward = forward
