"""P-22: under ZeRO-1 no rank copies its shard of the new fp32 weights to the bf16 weights."""

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import distributed

original = DistributedOptimizer._copy_main_params_to_model_params


def copy(self):
    if distributed.get_world_size() == 1:
        original(self)


DistributedOptimizer._copy_main_params_to_model_params = copy
