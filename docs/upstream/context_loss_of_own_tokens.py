"""Cures context-loss-of-own-tokens: a loss is divided by the tokens of all context-parallel ranks."""

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

calculate = schedules.forward_step_calc_loss


def of_all_ranks(model, output, loss_func, config, *args, **kwargs):
    ranks = parallel_state.get_context_parallel_world_size()

    def with_all_tokens(*given, **named):
        answer = loss_func(*given, **named)
        if len(answer) != 3 or ranks == 1 or config.calculate_per_token_loss:
            return answer
        total, tokens, report = answer
        tokens = tokens.clone()
        torch.distributed.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
        return total * ranks, tokens, report  # Gradients are averaged over these ranks.

    return calculate(model, output, with_all_tokens, config, *args, **kwargs)


schedules.forward_step_calc_loss = of_all_ranks
