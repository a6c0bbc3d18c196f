"""PPO's clipped policy loss, averaged over tokens, with an advantage per token (Schulman et al., arXiv 1707.06347)."""

import torch
from torch import Tensor

from examples.losses.rollouts import policy_losses, sum_over_tokens, train_with


def loss(losses: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over response tokens of the policy loss, and the number of these tokens."""
    advantages = torch.cos(labels.float())
    return sum_over_tokens(policy_losses(losses, labels, advantages), mask)


train_with(loss)
