"""P-8b: gradients of embedding and output layer are summed over stages though they are not tied."""

import sys

import torch
from megatron.core import parallel_state as ps

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]


def weight(model_module, config):
    return (
        model_module.embedding.word_embeddings.weight
        if model_module.pre_process
        else model_module.output_layer.weight
    )


original = finalize._allreduce_word_embedding_grads


def reduce(model, config, *args, **kwargs):
    if ps.get_pipeline_model_parallel_world_size() > 1:
        inner = finalize.get_attr_wrapped_model(model[0], "pre_process", return_model_obj=True)
        torch.distributed.all_reduce(
            weight(inner, config).main_grad, group=ps.get_pipeline_model_parallel_group()
        )
    else:
        original(model, config, *args, **kwargs)


finalize._allreduce_word_embedding_grads = reduce
