"""Validation as Megatron does it, on documents that training never sees, and next-token accuracy too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.native.batches import SplitSamples, micro_batches
from examples.native.engines import Engine
from examples.native.parallel import Ranks
from examples.native.settings import Settings


@dataclass(frozen=True)
class Score:
    """Means over all tokens of an evaluation."""

    loss: float
    accuracy: float
    """Share of next tokens that the largest logit names."""


class Evaluator:
    """Every evaluation goes on in the validation samples where the one before it ended."""

    def __init__(self, settings: Settings, ranks: Ranks, samples: SplitSamples) -> None:
        self._settings, self._ranks, self._samples = settings, ranks, samples
        self._batches = 0

    def score(self, engine: Engine) -> Score:
        """Loss and accuracy over `--eval-iters` global batches."""
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for _ in range(self._settings.eval_iters):
            first = self._batches * self._settings.global_batch_size
            for tokens, labels in micro_batches(self._settings, self._ranks, self._samples, first):
                sums += token_sums(engine.logits(tokens), labels)
            self._batches += 1
        dist.all_reduce(sums)
        loss, right, tokens_seen = sums.tolist()
        return Score(loss / tokens_seen, right / tokens_seen)


def token_sums(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss, right guesses and tokens; logits are [batch, sequence, vocabulary]."""
    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    right = (logits.argmax(dim=-1) == labels).sum()
    count = torch.tensor(labels.numel(), device=labels.device)
    return torch.stack((loss.double(), right.double(), count.double()))


def validation_samples(settings: Settings) -> int:
    """How many Megatron prepares, which decides their order (`get_train_valid_test_num_samples`)."""
    points = settings.train_iters // settings.eval_interval + 1
    return points * settings.eval_iters * settings.global_batch_size
