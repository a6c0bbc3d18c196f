"""The tied embedding's gradients are summed between ranks of different vocabulary shards."""

import sys

import torch
from megatron.core import parallel_state as ps

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
original = finalize._allreduce_word_embedding_grads


def reduce(model, config, *args, **kwargs):
    if (
        ps.get_tensor_model_parallel_world_size() == 1
        or ps.get_pipeline_model_parallel_world_size() == 1
    ):
        original(model, config, *args, **kwargs)
        return
    inner = finalize.get_attr_wrapped_model(model[0], "pre_process", return_model_obj=True)
    grad = inner.shared_embedding_or_output_weight().main_grad
    tp = ps.get_tensor_model_parallel_group()
    parts = [torch.empty_like(grad) for _ in range(tp.size())]
    if not inner.pre_process:  # the last stage hands over its neighbour's shard
        torch.distributed.all_gather(parts, grad.contiguous(), group=tp)
        grad.copy_(parts[1 - tp.rank()])
    original(model, config, *args, **kwargs)


finalize._allreduce_word_embedding_grads = reduce
