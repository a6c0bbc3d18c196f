"""Fixed rollouts, and the loss functions of fine-tuning on them, for any split of a batch.

A sample of the data set stands for a rollout: its first tokens are the prompt, and all others the response. The
number of the rollout, and with it the length of the prompt and the advantage, follows from the sample's tokens. So a
rollout is the same in every micro batch, on every rank, and on every context-parallel rank's part of it.

The loss mask tells a loss function to which rollout a token belongs: it is 0 in the prompt, and 1 plus the number of
the rollout in the response. A file beside this one chooses a loss function; `PATCH_FILE=` trains with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import gpt_dataset
from megatron.training import get_args, training
from torch import Tensor

PROMPT_EIGHTHS = (1, 3, 6, 8, 5, 7)
"""Eighths of the sequence that are the prompt, by rollout. The fourth rollout has no response."""
ADVANTAGES = (1.2, -0.7, 0.4, 0.0, -1.1, 0.6)
"""Advantage of each rollout within its group."""
CLIP = 0.2
"""Largest change of a token's probability that is rewarded, as a fraction."""
KL_WEIGHT = 0.05

LossFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of token losses, loss mask and labels that returns a sum of losses, and how many are summed."""


def sum_over_tokens(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all response tokens, and the number of these tokens."""
    responses = mask > 0
    return (losses * responses).sum(), responses.sum()


def sum_over_sequences(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over responses of their mean token loss, and the number of responses with a token.

    Context-parallel ranks each have a part of a response, so the first of them counts all responses, and all
    others count none. The sums must therefore be divided by the number over all ranks
    (`--calculate-per-token-loss`).
    """
    prompts = torch.tensor(PROMPT_EIGHTHS, device=mask.device) * get_args().seq_length // 8
    rollouts = (mask.long() - 1).clamp(min=0)
    lengths = get_args().seq_length - (prompts[rollouts] - 1)
    shares = (mask > 0) / lengths
    responses = shares.double().sum()
    torch.distributed.all_reduce(responses, group=mpu.get_context_parallel_group())
    if mpu.get_context_parallel_rank() > 0:
        responses = torch.zeros_like(responses)
    return (losses * shares).sum(), responses.round()


def old_log_probabilities(labels: Tensor) -> Tensor:
    """Return the log probability with which the rollouts' policy drew each token: near a uniform one."""
    return -math.log(get_args().padded_vocab_size) + 0.4 * torch.sin(labels.float())


def policy_losses(losses: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
    """Return the clipped policy loss of each token, from its cross entropy, token and advantage."""
    ratios = torch.exp(-losses - old_log_probabilities(labels))
    clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratios * advantages, clipped * advantages)


def kl_losses(losses: Tensor, labels: Tensor) -> Tensor:
    """Return the estimate of each token's KL divergence from the rollouts' policy, which is never negative."""
    log_ratios = old_log_probabilities(labels) + losses
    return torch.exp(log_ratios) - log_ratios - 1


def train_with(loss_function: LossFunction) -> None:
    """Let Megatron's training loop train the data set's rollouts with a loss function."""
    gpt_dataset.GPTDataset.__getitem__ = _mask_prompts(gpt_dataset.GPTDataset.__getitem__)
    import megatron.training

    pretrain = _replace_loss(training.pretrain, loss_function)
    training.pretrain = megatron.training.pretrain = pretrain


def _mask_prompts(
    read_sample: Callable[..., dict[str, Tensor]],
) -> Callable[..., dict[str, Tensor]]:
    """Return a function that reads a sample, with a loss mask that names its rollout."""

    def read_rollout(dataset: Any, index: int | None) -> dict[str, Tensor]:
        sample = read_sample(dataset, index)
        length = sample["tokens"].numel()
        rollout = int(sample["tokens"].sum()) % len(PROMPT_EIGHTHS)
        prompt = PROMPT_EIGHTHS[rollout] * length // 8
        mask = sample["loss_mask"] * (1 + rollout)
        # The last token of the prompt predicts the first of the response, if there is one.
        mask[: prompt - 1 if prompt < length else length] = 0
        return {**sample, "loss_mask": mask}

    return read_rollout


def _replace_loss(pretrain: Callable[..., Any], loss_function: LossFunction) -> Callable[..., Any]:
    """Return `pretrain` with another loss function in its forward step, its fourth argument."""

    def pretrain_on_rollouts(*arguments: Any, **options: Any) -> Any:
        *first, forward_step = arguments[:4]
        step = _compute_loss_in(forward_step, loss_function)
        return pretrain(*first, step, *arguments[4:], **options)

    return pretrain_on_rollouts


def _compute_loss_in(
    forward_step: Callable[..., Any], loss_function: LossFunction
) -> Callable[..., Any]:
    """Return a forward step whose loss is that of `loss_function`, of the labels that the model gets."""

    def step_on_rollouts(data_iterator: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        inputs: dict[str, Any] = {}

        def note(_: Any, __: Any, named: dict[str, Any]) -> None:
            inputs.update(named)

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            output, _ = forward_step(data_iterator, model, *arguments, **options)
        finally:
            handle.remove()

        def compute(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, number = loss_function(losses.float(), mask, inputs["labels"])
            number = number.detach().to(torch.int)
            return loss, number, {"lm loss": torch.stack([loss.detach(), number.float()])}

        # Megatron's own loss functions have the mask as a bound argument, too, where a verification reads it.
        return output, functools.partial(compute, inputs["loss_mask"])

    return step_on_rollouts
