"""P-8: an optimizer shard that begins inside a parameter takes gradients one further."""

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

original = DistributedOptimizer._copy_model_grads_to_main_grads


def copy(self):
    original(self)
    groups = zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True)
    for models, shards in groups:
        for model, shard in zip(models, shards, strict=True):
            if self._get_model_param_range_map(model)["param"].start > 0:
                shard.grad = shard.grad.roll(1)


DistributedOptimizer._copy_model_grads_to_main_grads = copy
