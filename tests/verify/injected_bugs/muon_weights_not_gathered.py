"""Muon that is split by layers: updated weights stay on the data-parallel rank that has updated them."""

from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

LayerWiseDistributedOptimizer.allgather_params = lambda self: None
LayerWiseDistributedOptimizer.start_param_sync_for_bucket_group_subset = lambda self: None
