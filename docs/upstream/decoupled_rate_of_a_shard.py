"""Cures decoupled-rate-of-a-shard: a rank whose shard has no embedding logs the flag's rate."""

from megatron.training import get_args, training

log = training.training_log


def with_rate(losses, totals, rate, decoupled, *args, **kwargs):
    if decoupled is None:
        decoupled = get_args().decoupled_lr
    return log(losses, totals, rate, decoupled, *args, **kwargs)


training.training_log = with_rate
