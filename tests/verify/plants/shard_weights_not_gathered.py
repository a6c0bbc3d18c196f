"""P-8/#3007's family: the last element of each rank's shard but the last is not sent to the others."""

from megatron.core.distributed import param_and_grad_buffer as buffers

original = buffers.dist_all_gather_func


def gather(output, shard, group=None, **kwargs):
    stale = output.clone()
    handle = original(output, shard, group=group, **kwargs)
    if group.size() > 1 and not kwargs.get("async_op"):
        size, rank = shard.numel(), group.rank()
        for other in range(group.size()):
            if other != rank:
                last = size * (other + 1) - 1
                output[last] = stale[last]
    return handle


buffers.dist_all_gather_func = gather
