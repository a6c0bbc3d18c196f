"""GRPO's loss: policy loss plus KL, averaged per response, with one advantage per response (arXiv 2402.03300)."""

import torch
from torch import Tensor

from examples.losses.rollouts import (
    ADVANTAGES,
    KL_WEIGHT,
    kl_losses,
    policy_losses,
    sum_over_sequences,
    train_with,
)


def loss(losses: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over responses of the mean of policy loss and KL, and the number of responses."""
    rollouts = (mask.long() - 1).clamp(min=0)
    advantages = torch.tensor(ADVANTAGES, device=mask.device)[rollouts]
    policy = policy_losses(losses, labels, advantages)
    return sum_over_sequences(policy + KL_WEIGHT * kl_losses(losses, labels), mask)


train_with(loss)
