"""TTrace's #1464: what other CP ranks' queries give to a key's or value's gradient is lost."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

original = mappings.gather_from_sequence_parallel_region


def gather(input_, tensor_parallel_output_grad=True, group=None, **kwargs):
    if group is not None and group is parallel_state.get_context_parallel_group():
        tensor_parallel_output_grad = False
    return original(input_, tensor_parallel_output_grad, group=group, **kwargs)


mappings.gather_from_sequence_parallel_region = gather
