"""Causal attention on SDPA: over a sequence split between ranks, and whole on a GPU.

Megatron's own DotProductAttention refuses context parallelism. Rank r of c holds the chunks r and
2c−1−r of 2c, so that causal work is even. Here K and V are gathered over the group and gathered again
in backward, which sends what the ring of Transformer Engine sends, 6U(c−1)/c a layer, and keeps only
the local K and V between the passes (Ring Attention, arXiv 2310.01889; Llama 3, arXiv 2407.21783 §3.3).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_patches.registry import Replacement, around, no_te_patch


def positions_of_rank(rank: int, ranks: int, local_length: int) -> Tensor:
    """Global positions of a rank's tokens, shape [local_length], in the order it holds them."""
    chunk = local_length // 2
    first = torch.arange(rank * chunk, (rank + 1) * chunk)
    second = torch.arange((2 * ranks - 1 - rank) * chunk, (2 * ranks - rank) * chunk)
    return torch.cat((first, second))


def positions_of_gathered(ranks: int, local_length: int) -> Tensor:
    """Global positions of all ranks' tokens, shape [local_length·ranks], in rank order."""
    return torch.cat([positions_of_rank(r, ranks, local_length) for r in range(ranks)])


@functools.lru_cache(maxsize=4)
def causal_mask(rank: int, ranks: int, local_length: int) -> Tensor:
    """True where a query may attend to a key, shape [local_length, local_length·ranks].

    Rows are this rank's positions, columns those of all ranks in rank order: attention does not
    depend on the order of keys, so the gathered K and V need no reordering.
    """
    queries = positions_of_rank(rank, ranks, local_length)
    keys = positions_of_gathered(ranks, local_length)
    return queries[:, None] >= keys[None, :]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, p: float
) -> Tensor:
    """SDPA in Megatron's layout: [s, b, heads, width] in, [s, b, heads·width] out.

    Without a mask it is causal, which flash kernels can do without keeping scores. They take no mask;
    those that do share no key between heads, so keys and values are repeated for them.
    """
    if mask is not None and query.size(2) != key.size(2):
        shared = query.size(2) // key.size(2)
        key, value = (tensor.repeat_interleave(shared, 2) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=p,
        scale=scale,
        enable_gqa=query.size(2) != key.size(2),
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def is_plain(attention: Any) -> bool:
    """Whether Megatron's attention is causal, over all that came before, with the usual softmax."""
    return _is_causal(attention) and not _ends_at_documents()


def _is_causal(attention: Any) -> bool:
    """The same but for what a mask hides as well."""
    from megatron.core.transformer.enums import AttnMaskType

    return (
        attention.attn_mask_type == AttnMaskType.causal
        and attention.config.window_size is None
        and getattr(attention, "softmax_offset", None) is None
    )


def _ends_at_documents() -> bool:
    """Whether attention ends where a document does (`--reset-attention-mask`), which no config says."""
    from megatron.training import global_vars

    return bool(getattr(global_vars._GLOBAL_ARGS, "reset_attention_mask", False))


def has_bias_or_packing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a bias or packed sequences are given; Megatron's own attention refuses those."""
    named = (kwargs.get(name) for name in ("attention_bias", "packed_seq_params"))
    return any(value is not None for value in (*args[2:], *named))


@around
def _without_refusal(
    original: Callable[..., None],
    self: Any,
    config: Any,
    *args: Any,
    k_channels: int | None = None,  # noqa: ARG001 - the scale that depends on it is given
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    unsplit = copy.copy(config)
    unsplit.context_parallel_size = 1
    original(self, unsplit, *args, **kwargs)
    self.config = config
    if v_channels is not None:
        # Multi-latent attention: values, and so the output, have a width of their own.
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _attend_dropping(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """`attend` with the dropout, scale and random state of one of Megatron's attention modules."""
    from megatron.core import tensor_parallel

    dropout = attention.attention_dropout.p if attention.training else 0.0
    # Query-key layer scaling divides the scores by the layer's number, and multiplies them later.
    scale = attention.softmax_scale * (attention.scale_mask_softmax.scale or 1.0)
    arguments = (query, key, value, mask, scale, dropout)
    if attention.config.sequence_parallel:
        return attend(*arguments)
    # As Megatron's own: TP ranks hold different heads and must drop different scores.
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return attend(*arguments)


def gathered_mask(hidden: Tensor | None, rank: int, ranks: int, local_length: int) -> Tensor:
    """`causal_mask` without what Megatron's own mask hides as well, such as other documents.

    Args:
        hidden: True where a query may not attend, shape [b, 1, local_length, local_length·ranks], its
            rows this rank's and its columns in the order of the sequence; None hides nothing more.
        rank: Of this process in its context-parallel group.
        ranks: Of the group.
        local_length: Tokens of a rank.
    """
    mask = causal_mask(rank, ranks, local_length)
    if hidden is None:
        return mask
    keys = positions_of_gathered(ranks, local_length)
    return mask.to(hidden.device) & ~hidden[..., keys.to(hidden.device)]


def _attend_gathered(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None
) -> Tensor:
    """Attention of a rank's queries to all ranks' keys and values."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    group = parallel_state.get_context_parallel_group()
    # Gathers along the sequence; its backward is the reduce-scatter of dK and dV.
    gather = functools.partial(gather_from_sequence_parallel_region, group=group)
    mask = gathered_mask(hidden, group.rank(), group.size(), query.size(0)).to(query.device)
    return _attend_dropping(attention, query, gather(key), gather(value), mask)


def _hidden_by_documents(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return Megatron's mask where documents are masked from one another, else None.

    Raises:
        NotImplementedError: The attention is not plain causal, it gets a bias or packed sequences, or
            no mask is given by which it could end at documents.
    """
    # Plain causal attention needs no mask of each sample.
    documents = _ends_at_documents()
    hidden: Tensor | None = (
        (args[0] if args else kwargs.get("attention_mask")) if documents else None
    )
    # A later pipeline stage gets no mask, and could not end at documents.
    without_mask = documents and hidden is None
    if not _is_causal(attention) or without_mask or has_bias_or_packing(args, kwargs):
        raise NotImplementedError(
            f"Context parallelism without Transformer Engine knows plain causal attention, not "
            f"{attention.attn_mask_type} with window {attention.config.window_size} and softmax "
            f"'{getattr(attention.config, 'softmax_type', 'vanilla')}', no bias, no packed sequences, "
            "and --reset-attention-mask only where a mask is given."
        )
    return hidden


@around
def _on_sdpa(
    original: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    from megatron.core import tensor_parallel

    if self.config.context_parallel_size == 1:
        # CPU ranks use Megatron's own attention; on a GPU its scores would fill the memory.
        if query.is_cuda and is_plain(self) and not has_bias_or_packing(args, kwargs):
            return _attend_dropping(self, query, key, value, None)
        if self.config.multi_latent_attention:
            # Both are parts of one tensor, which Megatron views as rows; others need no copy.
            key, value = key.contiguous(), value.contiguous()
        return original(self, query, key, value, *args, **kwargs)
    hidden = _hidden_by_documents(self, args, kwargs)
    # Recomputing this part in backward is what gathers K and V a second time.
    out: Tensor = tensor_parallel.checkpoint(
        functools.partial(_attend_gathered, self), False, query, key, value, hidden
    )
    return out


PATCH = no_te_patch(
    "attention",
    "Megatron's own attention refuses context parallelism and MLA, and keeps its scores",
    Replacement(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        _without_refusal,
    ),
    Replacement(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        _on_sdpa,
    ),
)
