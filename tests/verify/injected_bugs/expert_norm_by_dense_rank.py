"""C3 (#5916): experts' gradients are left out of the norm by the rank in the dense layers' group."""

from megatron.core import tensor_parallel

original = tensor_parallel.param_is_not_tensor_parallel_duplicate


def is_not_duplicate(parameter, tp_group=None, expert_tp_group=None):
    if tp_group is not None and not getattr(parameter, "allreduce", True):
        return tp_group.rank() == 0
    return original(parameter, tp_group, expert_tp_group)


tensor_parallel.param_is_not_tensor_parallel_duplicate = is_not_duplicate
