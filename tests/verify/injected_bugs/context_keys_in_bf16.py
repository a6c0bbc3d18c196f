"""Context parallelism: keys and values lose precision between ranks, as an fp32 run sends what bf16 can hold."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

original = mappings.gather_from_sequence_parallel_region


def gather(input_, *args, group=None, **kwargs):
    if group is not None and group is parallel_state.get_context_parallel_group():
        input_ = input_ + (input_.bfloat16().float() - input_).detach()
    return original(input_, *args, group=group, **kwargs)


mappings.gather_from_sequence_parallel_region = gather
