"""Compute cross entropy over chunks of tokens, without fp32 logits of the full micro batch.

Target: `vocab_parallel_cross_entropy` (`FUSED=cross_entropy`). Without the patch, Megatron makes an fp32
copy of the logits and stores it as the softmax for backward: 4 bytes per element beside the logits' 2.
Its native fusion (`--cross-entropy-loss-fusion`, up to 0.19) stores it too, and returns the gradient in
bf16 even under fp16.

Here forward stores the logits as they are and one log-sum-exp per token. Backward computes the softmax
again and writes the gradient over the logits, which nothing reads after that. Only a few chunks of fp32
exist at a time. Over TP ranks, each of which has a part of the vocabulary, the ranks' log-sum-exps are
combined to log Σ exp(lse_r).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patches.fused import compile_once
from megatron_patches.registry import Replacement, fused_patch, wrap_original

CHUNK_TOKENS = 2048
"""Number of tokens per chunk. With GPT-2's vocabulary, a chunk has 103 million logits: 0.4 GB per
temporary tensor in fp32."""


def token_statistics(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the target's logit of each token, both [n], in fp32 or float64.

    Args:
        logits: Logits of this rank's part of the vocabulary, [n, v].
        target: Index of the correct token in this part, [n]. An index outside of 0 … v−1 belongs to
            another rank, and the logit is then 0.
    """
    wide = _widen(logits)
    lse = torch.logsumexp(wide, -1)
    is_target = torch.arange(logits.size(-1), device=logits.device) == target[:, None]
    return lse, torch.where(is_target, wide, 0.0).sum(-1)


def write_gradient(logits: Tensor, target: Tensor, lse: Tensor, upstream: Tensor) -> None:
    """Overwrite the logits [n, v] with their gradient, (softmax − one-hot) · upstream.

    `target`, `lse` (from `token_statistics`) and `upstream` (the gradient of the losses) are [n].
    """
    is_target = torch.arange(logits.size(-1), device=logits.device) == target[:, None]
    softmax = torch.exp(_widen(logits) - lse[:, None])
    logits.copy_((softmax - is_target.to(softmax.dtype)) * upstream[:, None])


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loss per token. Backward overwrites the logits with their gradient, so it can run only once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        """Return the losses [s, b] of logits [s, b, v / TP] and targets [s, b].

        `group` is the tensor-parallel group; None is a single rank.
        """
        flat, local = logits.view(-1, logits.size(-1)), target.reshape(-1)
        is_split = group is not None and group.size() > 1
        if is_split:
            local = local - group.rank() * flat.size(-1)
        statistics = compile_once(token_statistics)
        lse_chunks, target_chunks = [], []
        for tensors in _split_into_chunks(flat, local):
            chunk_lse, chunk_target_logits = statistics(*tensors)
            lse_chunks.append(chunk_lse)
            target_chunks.append(chunk_target_logits)
        lse, target_logits = torch.cat(lse_chunks), torch.cat(target_chunks)
        if is_split:
            lse, target_logits = _combine_over_ranks(lse, target_logits, group)
        ctx.save_for_backward(logits, local, lse)
        return (lse - target_logits).view(target.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits, in the memory of the logits."""
        logits, local, lse = ctx.saved_tensors
        # A detached tensor still counts its changes, so torch refuses a second backward.
        flat = logits.detach().view(-1, logits.size(-1))
        write = compile_once(write_gradient)
        for tensors in _split_into_chunks(flat, local, lse, upstream[0].reshape(-1)):
            write(*tensors)
        return logits.detach(), None, None


def _widen(logits: Tensor) -> Tensor:
    """Return the logits in fp32; float64 stays float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _split_into_chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the tensors' views of `CHUNK_TOKENS` rows each, one tuple per chunk."""
    chunks_by_tensor = [torch.split(tensor, CHUNK_TOKENS) for tensor in tensors]
    return list(zip(*chunks_by_tensor, strict=True))


def _combine_over_ranks(lse: Tensor, target_logits: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps over the full vocabulary and the targets' logits, both [n].

    On each rank, `target_logits` is 0 for targets of other ranks, so the ranks' sum is the logit.
    """
    highest = lse.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    # Both sums have one number per token, so one all-reduce sends them together.
    sums = torch.stack((torch.exp(lse - highest), target_logits))
    dist.all_reduce(sums, group=group)
    return highest + torch.log(sums[0]), sums[1]


@wrap_original
def _compute_chunked(
    _: Callable[..., Tensor],
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
) -> Tensor:
    """Return the losses as `vocab_parallel_cross_entropy` does.

    Raises:
        NotImplementedError: Label smoothing is on.
    """
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
    Replacement("megatron.core.tensor_parallel:vocab_parallel_cross_entropy", _compute_chunked),
)
