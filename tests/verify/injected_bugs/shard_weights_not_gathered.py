"""P-8/#3007's family: the last element of each rank's shard of the weights is not sent to the others."""

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

original = _ParamAndGradBucketGroup.start_param_sync


def start(self, *args, **kwargs):
    ranks = self.intra_distributed_optimizer_instance_size
    own_rank = self.intra_distributed_optimizer_instance_rank
    stale = [bucket.param_data.clone() for bucket in self.buckets]
    original(self, *args, **kwargs)
    for bucket, before in zip(self.buckets, stale, strict=True):
        size = before.numel() // ranks
        for rank in range(ranks):
            # Its last element; the last rank's shard ends with padding.
            if rank not in (own_rank, ranks - 1):
                bucket.param_data[size * (rank + 1) - 1] = before[size * (rank + 1) - 1]


_ParamAndGradBucketGroup.start_param_sync = start
