"""TTrace's "DP wrong loss scale": a rank's loss is divided by the ranks, and its gradients again."""

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

original = schedules.forward_step_calc_loss


def calculate(*args, **kwargs):
    loss, tokens = original(*args, **kwargs)
    ranks = parallel_state.get_data_parallel_world_size()
    return (loss / ranks if ranks > 1 else loss), tokens


schedules.forward_step_calc_loss = calculate
