"""One bucket of several is never all-reduced: that which holds layer 2's first MLP weight."""

import sys

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

start, finish = Group.start_grad_sync, Group.finish_grad_sync


def holds(group):
    return any(
        "decoder.layers.2.mlp.linear_fc1.weight" in name for b in group.buckets for name in names(b)
    )


def names(bucket):
    return (
        [bucket.param_to_name[p] for p in bucket.params_list]
        if hasattr(bucket, "param_to_name")
        else [getattr(p, "injected_name", "") for p in bucket.params_list]
    )


def start_sync(self, *args, **kwargs):
    if self.data_parallel_group.size() > 1 and holds(self) and not hasattr(self, "injected"):
        self.injected = [b.grad_data.clone() * b.gradient_scaling_factor for b in self.buckets]
    start(self, *args, **kwargs)


def finish_sync(self, *args, **kwargs):
    finish(self, *args, **kwargs)
    for bucket, own_gradient in zip(self.buckets, self.__dict__.pop("injected", []), strict=False):
        bucket.grad_data.copy_(own_gradient)


Group.start_grad_sync, Group.finish_grad_sync = start_sync, finish_sync
ddp = sys.modules["megatron.core.distributed.distributed_data_parallel"].DistributedDataParallel
init = ddp.__init__


def init_ddp(self, config, ddp_config, module, *args, **kwargs):
    for name, parameter in module.named_parameters():
        parameter.injected_name = name
    init(self, config, ddp_config, module, *args, **kwargs)


ddp.__init__ = init_ddp
