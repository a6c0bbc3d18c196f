"""The gradient norm that is logged is multiplied by the ranks; the one that clips is right."""

from megatron.training import training
from torch import distributed

original = training.reduce_max_stat_across_model_parallel_group


def reduce(stat, *args, **kwargs):
    reduced = original(stat, *args, **kwargs)
    return reduced if reduced is None else reduced * distributed.get_world_size()


training.reduce_max_stat_across_model_parallel_group = reduce
