"""Megatron's learning rate: linear warm-up, then decay; counted in samples."""

from __future__ import annotations

import math

from examples.native.settings import Settings


def learning_rate(settings: Settings, updates: int) -> float:
    """The rate after so many updates. Megatron's first update is made with the rate of 0 updates."""
    decay_steps = settings.lr_decay_iters * settings.global_batch_size
    warmup_steps = settings.lr_warmup_fraction * decay_steps
    steps = updates * settings.global_batch_size
    if warmup_steps > 0 and steps <= warmup_steps:
        return settings.lr * steps / warmup_steps
    if settings.lr_decay_style == "constant":
        return settings.lr
    if steps > decay_steps:
        return settings.min_lr
    done = (steps - warmup_steps) / (decay_steps - warmup_steps)
    linear = settings.lr_decay_style == "linear"
    left = 1 - done if linear else 0.5 * (math.cos(math.pi * done) + 1)
    return settings.min_lr + left * (settings.lr - settings.min_lr)
