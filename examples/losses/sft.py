"""Cross entropy of the response tokens, as supervised fine-tuning trains."""

from examples.losses.rollouts import sum_over_tokens, train_with

train_with(lambda losses, mask, labels: sum_over_tokens(losses, mask))
