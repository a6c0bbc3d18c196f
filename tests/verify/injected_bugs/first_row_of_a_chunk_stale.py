"""Sequence parallelism: the first token of a later rank's chunk is the last of the rank before."""

from megatron.core.tensor_parallel import mappings

original = mappings._split_along_first_dim


def split(input_, group):
    out = original(input_, group)
    if group.size() > 1 and group.rank() > 0 and out.dim() == 3:
        out = out.clone()
        out[0] = input_[out.shape[0] * group.rank() - 1]
    return out


mappings._split_along_first_dim = split
