"""Train on fixed rollouts with a loss function of fine-tuning, in any layout and micro batch size.

A sample of the data set stands for a rollout: its first tokens are the prompt, and all others are the response. The
sum of the sample's tokens gives the number of the rollout. The number gives the length of the prompt and the
advantage. So a sample is the same rollout in every micro batch and on every rank.

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
"""Largest change of a token's probability that still lowers the policy loss, as a fraction."""
KL_WEIGHT = 0.05
"""Weight of the KL divergence in GRPO's loss."""

LossFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of token losses, loss mask and labels. It returns a sum of losses, and the number of summed losses."""


def sum_over_tokens(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of all response tokens, and the number of these tokens."""
    responses = mask > 0
    return (losses * responses).sum(), responses.sum()


def sum_over_sequences(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over responses of their mean token loss, and the number of responses with a token.

    Each context-parallel rank has a part of a response. So the first context-parallel rank returns the number of
    all responses, and the other ranks return 0. The sum of the losses over all ranks must therefore be divided by
    the sum of these numbers over all ranks (`--calculate-per-token-loss`).
    """
    prompts = torch.tensor(PROMPT_EIGHTHS, device=mask.device) * get_args().seq_length // 8
    rollouts = (mask.long() - 1).clamp(min=0)
    lengths = get_args().seq_length - (prompts[rollouts] - 1)
    weights = (mask > 0) / lengths
    responses = weights.double().sum()
    torch.distributed.all_reduce(responses, group=mpu.get_context_parallel_group())
    if mpu.get_context_parallel_rank() > 0:
        responses = torch.zeros_like(responses)
    return (losses * weights).sum(), responses.round()


def old_log_probabilities(labels: Tensor) -> Tensor:
    """Return the log probability of each token under the policy that made the rollouts, which is nearly uniform."""
    return -math.log(get_args().padded_vocab_size) + 0.4 * torch.sin(labels.float())


def policy_losses(losses: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's clipped policy loss of each token, given its cross entropy, its label and its advantage."""
    ratios = torch.exp(-losses - old_log_probabilities(labels))
    clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratios * advantages, clipped * advantages)


def kl_losses(losses: Tensor, labels: Tensor) -> Tensor:
    """Return each token's estimate of the KL divergence from the rollouts' policy; no estimate is negative."""
    log_ratios = old_log_probabilities(labels) + losses
    return torch.exp(log_ratios) - log_ratios - 1


def train_with(loss_function: LossFunction) -> None:
    """Replace Megatron's loss function and the loss mask of its data set, in this process."""
    gpt_dataset.GPTDataset.__getitem__ = _mask_prompts(gpt_dataset.GPTDataset.__getitem__)
    import megatron.training

    pretrain = _replace_loss(training.pretrain, loss_function)
    training.pretrain = megatron.training.pretrain = pretrain


def _mask_prompts(
    read_sample: Callable[..., dict[str, Tensor]],
) -> Callable[..., dict[str, Tensor]]:
    """Return `read_sample` with a loss mask that names the rollout of each response token."""

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
        step = _compute_loss_in(arguments[3], loss_function)
        return pretrain(*arguments[:3], step, *arguments[4:], **options)

    return pretrain_on_rollouts


def _compute_loss_in(
    forward_step: Callable[..., Any], loss_function: LossFunction
) -> Callable[..., Any]:
    """Return `forward_step` with `loss_function`, which gets the labels that the model gets."""

    def step_on_rollouts(data_iterator: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        inputs: dict[str, Any] = {}

        def record_inputs(_: Any, __: Any, keywords: dict[str, Any]) -> None:
            inputs.update(keywords)

        handle = model.register_forward_pre_hook(record_inputs, with_kwargs=True)
        try:
            output, _ = forward_step(data_iterator, model, *arguments, **options)
        finally:
            handle.remove()

        def compute(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, number = loss_function(losses.float(), mask, inputs["labels"])
            number = number.detach().to(torch.int)
            return loss, number, {"lm loss": torch.stack([loss.detach(), number.float()])}

        # A verification reads the mask from the first bound argument, as Megatron's own loss functions have it.
        return output, functools.partial(compute, inputs["loss_mask"])

    return step_on_rollouts
