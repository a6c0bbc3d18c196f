"""Cross entropy of the response tokens, averaged within each response, so that all responses have the same weight."""

from examples.losses.rollouts import sum_over_sequences, train_with

train_with(lambda losses, mask, labels: sum_over_sequences(losses, mask))
