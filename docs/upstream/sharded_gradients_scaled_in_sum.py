"""Cures sharded-gradients-scaled-in-sum: what is scaled is the bucket that is to be reduced."""

from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module

fetch, prepare = module.DataParallelBuffer.fetch_bucket, module.gradient_reduce_preprocessing
last = []


def fetched(self, *args, **kwargs):
    last[:] = [fetch(self, *args, **kwargs)]
    return last[0]


def prepared(_, *args, **kwargs):
    return prepare(last[0].data, *args, **kwargs)


module.DataParallelBuffer.fetch_bucket = fetched
module.gradient_reduce_preprocessing = prepared
