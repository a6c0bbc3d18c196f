"""Cross entropy over chunks of tokens, without fp32 logits of the whole micro batch.

Megatron's own makes an fp32 copy of the logits and keeps it as the softmax until backward: 4 bytes an
element beside the 2 of the logits. Its native fusion (`--cross-entropy-loss-fusion`, to 0.19) keeps it
too and returns the gradient in bf16, also under fp16. Here forward keeps the logits as they are and
one log-sum-exp a token; backward computes the softmax again and writes the gradient over the logits,
which are not read again. Only a few chunks of fp32 exist at a time.

Over TP ranks, each with a part of the vocabulary, log-sum-exps are combined: log Σ exp(lse_r).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patches.fused import compiled
from megatron_patches.registry import Replacement, around, fused_patch

CHUNK_TOKENS = 2048
"""206 million logits of GPT-2's vocabulary: 0.4 GB in fp32 a temporary."""


def token_statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and the target's logit of each token, fp32 (float64 stays); logits [n, v], target [n].

    A target outside 0 … v−1 is on another rank; its logit is 0 here.
    """
    wide = _wide(logits)
    lse = torch.logsumexp(wide, -1)
    hit = torch.arange(logits.size(-1), device=logits.device) == target[:, None]
    return lse, torch.where(hit, wide, 0.0).sum(-1)


def write_gradient(logits: Tensor, target: Tensor, lse: Tensor, upstream: Tensor) -> None:
    """Replace logits [n, v] by (softmax − one-hot) · upstream; target, lse and upstream are [n]."""
    hit = torch.arange(logits.size(-1), device=logits.device) == target[:, None]
    softmax = torch.exp(_wide(logits) - lse[:, None])
    logits.copy_((softmax - hit.to(softmax.dtype)) * upstream[:, None])


class ChunkedCrossEntropy(torch.autograd.Function):
    """Loss of each token; backward takes the logits' memory for their gradient, so it runs once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        """Loss [s, b] of logits [s, b, v / TP] and target [s, b]."""
        flat, local = logits.view(-1, logits.size(-1)), target.reshape(-1)
        if group is not None and group.size() > 1:
            local = local - group.rank() * flat.size(-1)
        statistics = compiled(token_statistics)
        chunks = [statistics(*pair) for pair in _chunks(flat, local)]
        lse, predicted = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        if group is not None and group.size() > 1:
            lse, predicted = _over_ranks(lse, predicted, group)
        ctx.save_for_backward(logits, local, lse)
        return (lse - predicted).view(target.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the logits, in their memory."""
        logits, local, lse = ctx.saved_tensors
        # Detached it still counts its changes, so that a second backward is refused.
        flat = logits.detach().view(-1, logits.size(-1))
        write = compiled(write_gradient)
        for part in _chunks(flat, local, lse, upstream[0].reshape(-1)):
            write(*part)
        return logits.detach(), None, None


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(torch.split(tensor, CHUNK_TOKENS) for tensor in tensors), strict=True))


def _over_ranks(lse: Tensor, predicted: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    highest = lse.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    # One call for both sums: each is a vector of one number a token.
    sums = torch.stack((torch.exp(lse - highest), predicted))
    dist.all_reduce(sums, group=group)
    return highest + torch.log(sums[0]), sums[1]


@around
def _chunked(
    _: Callable[..., Tensor],
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
) -> Tensor:
    if label_smoothing:
        raise NotImplementedError(
            f"FUSED=cross_entropy knows no label smoothing ({label_smoothing}); leave it out."
        )
    if tp_group is None:
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        tp_group = get_tensor_model_parallel_group()
    loss: Tensor = ChunkedCrossEntropy.apply(logits.contiguous(), target, tp_group)
    return loss


PATCH = fused_patch(
    "cross_entropy",
    "Megatron's loss keeps the softmax of all logits in fp32",
    Replacement("megatron.core.tensor_parallel:vocab_parallel_cross_entropy", _chunked),
)
