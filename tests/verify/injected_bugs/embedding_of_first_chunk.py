"""A7 (#7452): the embedding is scattered over a wrong group, and every rank gets the first chunk."""

from megatron.core import tensor_parallel

original = tensor_parallel.scatter_to_sequence_parallel_region


def scatter(input_, group=None):
    chunk = original(input_, group)
    first_row = group.rank() * chunk.size(0)
    return original(input_.roll(first_row, 0), group)


tensor_parallel.scatter_to_sequence_parallel_region = scatter
