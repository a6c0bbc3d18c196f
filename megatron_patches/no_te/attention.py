"""Compute causal attention over a sequence that is split between ranks, and on GPUs with torch's SDPA.

Targets: `DotProductAttention.__init__` and `DotProductAttention.forward`, Megatron's attention without
Transformer Engine. Without the patch, it would refuse context parallelism and multi-latent attention, and
on a GPU it would keep its [s, s] scores for backward.

Under context parallelism rank r of c holds the chunks r and 2c−1−r of 2c, so that all ranks have equally
much causal work. Here K and V are gathered over the group, and gathered again in backward. That sends as
many bytes as the ring of Transformer Engine, 6U(c−1)/c per layer, and stores only the local K and V for
backward (Ring Attention, arXiv 2310.01889; Llama 3, arXiv 2407.21783 §3.3).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_patches.registry import Replacement, no_te_patch, wrap_original


def rank_positions(rank: int, ranks: int, local_length: int) -> Tensor:
    """Return the global positions of a rank's tokens, [local_length], in the order of its tokens.

    `ranks` is the size of the context-parallel group, `local_length` the number of tokens per rank.
    """
    chunk = local_length // 2
    first = torch.arange(rank * chunk, (rank + 1) * chunk)
    second = torch.arange((2 * ranks - 1 - rank) * chunk, (2 * ranks - rank) * chunk)
    return torch.cat((first, second))


def gathered_positions(ranks: int, local_length: int) -> Tensor:
    """Return the global positions of the tokens of all ranks, [local_length·ranks], in rank order."""
    return torch.cat([rank_positions(rank, ranks, local_length) for rank in range(ranks)])


@functools.lru_cache(maxsize=4)
def causal_mask(rank: int, ranks: int, local_length: int) -> Tensor:
    """Return the mask that is True where a query may attend to a key, [local_length, local_length·ranks].

    Rows are the positions of `rank`, columns those of all ranks in rank order. Attention does not depend
    on the order of keys, so the gathered K and V need no reordering.
    """
    queries = rank_positions(rank, ranks, local_length)
    keys = gathered_positions(ranks, local_length)
    return queries[:, None] >= keys[None, :]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, p: float
) -> Tensor:
    """Return attention by SDPA in Megatron's layout: [s, b, heads, width] in, [s, b, heads·width] out.

    Args:
        query: Queries of all heads.
        key: Keys; they may have fewer heads than the queries (grouped-query attention).
        value: Values, with as many heads as the keys.
        mask: True where a query may attend. None is causal attention, which flash kernels compute
            without storing scores.
        scale: Factor of the scores.
        p: Dropout probability of the scores.
    """
    if mask is not None and query.size(2) != key.size(2):
        # The kernels that take a mask cannot share a key between heads, so keys and values are repeated.
        queries_per_key = query.size(2) // key.size(2)
        key = key.repeat_interleave(queries_per_key, 2)
        value = value.repeat_interleave(queries_per_key, 2)
    # SDPA takes and returns [b, heads, s, width].
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
    """Return True if attention is causal over all earlier tokens, with the usual softmax.

    `attention` is a `DotProductAttention`. A sliding window, a softmax offset or attention that ends at
    documents gives False.
    """
    return _is_causal(attention) and not _ends_at_documents()


def _is_causal(attention: Any) -> bool:
    """Return True if attention is causal and has neither a window nor a softmax offset."""
    from megatron.core.transformer.enums import AttnMaskType

    return (
        attention.attn_mask_type == AttnMaskType.causal
        and attention.config.window_size is None
        and getattr(attention, "softmax_offset", None) is None
    )


def _ends_at_documents() -> bool:
    """Return True under `--reset-attention-mask`, which ends attention at documents.

    The flag is read from Megatron's global arguments, because no config has it.
    """
    from megatron.training import global_vars

    return bool(getattr(global_vars._GLOBAL_ARGS, "reset_attention_mask", False))


def has_bias_or_packing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if `forward` gets a bias or packed sequences, which Megatron's own attention refuses.

    `args` and `kwargs` are the arguments of `forward` after query, key and value.
    """
    # The first two are the mask and its type.
    positional = args[2:]
    by_name = (kwargs.get("attention_bias"), kwargs.get("packed_seq_params"))
    return any(value is not None for value in (*positional, *by_name))


@wrap_original
def _initialise(
    original: Callable[..., None],
    self: Any,
    config: Any,
    *args: Any,
    k_channels: int | None = None,  # noqa: ARG001 - the scale is an argument, so it is not derived
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    """Initialise the attention, so that it does not refuse context parallelism and multi-latent attention."""
    config_without_cp = copy.copy(config)
    config_without_cp.context_parallel_size = 1
    original(self, config_without_cp, *args, **kwargs)
    self.config = config
    if v_channels is not None:
        # Under multi-latent attention values, and so the output, have another width than keys.
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _attend_with_settings(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the attention output that `attend` computes with the settings of a `DotProductAttention`.

    The settings are its dropout (0 outside training), its scale of the scores and its random state.
    """
    from megatron.core import tensor_parallel

    dropout = attention.attention_dropout.p if attention.training else 0.0
    # With query-key layer scaling, `softmax_scale` is divided by the layer's number, and the softmax
    # multiplies by it again; SDPA has one scale.
    scale = attention.softmax_scale * (attention.scale_mask_softmax.scale or 1.0)
    arguments = (query, key, value, mask, scale, dropout)
    if attention.config.sequence_parallel:
        return attend(*arguments)
    # TP ranks hold different heads and must drop different scores, so Megatron has a random state for
    # them. Under sequence parallelism it does not use that state here.
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return attend(*arguments)


def gathered_mask(hidden: Tensor | None, rank: int, ranks: int, local_length: int) -> Tensor:
    """Return `causal_mask` in which the keys that Megatron's mask hides, such as other documents, are hidden
    too.

    Args:
        hidden: True where a query may not attend, [b, 1, local_length, local_length·ranks]. Rows are
            this rank's tokens, columns are in the order of the sequence. None hides nothing.
        rank: Number of this process in its context-parallel group.
        ranks: Size of the group.
        local_length: Number of tokens per rank.
    """
    mask = causal_mask(rank, ranks, local_length)
    if hidden is None:
        return mask
    keys = gathered_positions(ranks, local_length)
    return mask.to(hidden.device) & ~hidden[..., keys.to(hidden.device)]


def hidden_keys(rank: int, ranks: int, local_length: int) -> Tensor:
    """Return the causal attention mask of one context-parallel rank, as Megatron writes masks.

    The mask has the shape [1, 1, local_length, local_length·ranks], and is True where a query may not attend to
    a key. Its rows are the tokens that `rank` holds, in the rank's order. Its columns are all tokens in the
    order of the sequence.
    """
    queries = rank_positions(rank, ranks, local_length)
    keys = torch.arange(local_length * ranks)
    is_later_key = queries[:, None] < keys[None, :]
    return is_later_key[None, None]


def hidden_outside_documents(
    cumulative_lengths: Tensor, rank: int, ranks: int, local_length: int
) -> Tensor:
    """Return `hidden_keys` that also hides the keys of other documents of a packed sequence.

    Args:
        cumulative_lengths: Position of each document's first token in the sequence, and the sequence's length.
        rank: Number of this process in its context-parallel group.
        ranks: Size of the group.
        local_length: Number of tokens per rank.
    """
    queries = rank_positions(rank, ranks, local_length) if ranks > 1 else torch.arange(local_length)
    keys = torch.arange(local_length * ranks)
    ends = cumulative_lengths[1:].to(queries)
    query_documents = torch.bucketize(queries, ends, right=True)
    key_documents = torch.bucketize(keys, ends, right=True)
    is_other_document = query_documents[:, None] != key_documents[None, :]
    is_later_key = queries[:, None] < keys[None, :]
    return (is_later_key | is_other_document)[None, None]


def _attend_gathered(
    attention: Any,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
) -> Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks in its group.

    On GPUs SDPA computes the attention. On a CPU Megatron's own `forward` (`original`) computes it, with
    explicit scores as for all other strategies, because SDPA rounds differently. In the softmax's gradient
    SDPA subtracts dO·O from each row, and the explicit softmax subtracts the sum of its own products. If that
    row sum is much larger than the remaining differences, SDPA's dQ has ten times the rounding error.

    `hidden` is Megatron's mask as in `gathered_mask`.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    group = parallel_state.get_context_parallel_group()
    rank, ranks, local_length = group.rank(), group.size(), query.size(0)
    # This function gathers along the sequence; its backward is the reduce-scatter of dK and dV.
    all_keys = gather_from_sequence_parallel_region(key, group=group)
    all_values = gather_from_sequence_parallel_region(value, group=group)
    if query.is_cuda:
        mask = gathered_mask(hidden, rank, ranks, local_length).to(query.device)
        return _attend_with_settings(attention, query, all_keys, all_values, mask)
    if hidden is None:
        hidden = hidden_keys(rank, ranks, local_length)
    # The ranks' keys come one rank after the other. In the order of the sequence, each row gets the sums
    # that a single rank computes.
    order = gathered_positions(ranks, local_length).argsort()
    return original(attention, query, all_keys[order], all_values[order], hidden)


def _find_mask(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return Megatron's mask for this rank's queries under `--reset-attention-mask`; otherwise None.

    A causal mask without documents is computed again in backward. Given to the checkpoint, it would be
    stored for backward.

    `args` and `kwargs` are the arguments of `forward` after query, key and value.

    Raises:
        NotImplementedError: The attention is not plain causal, it gets a bias or packed sequences, or
            it should end at documents and gets no mask.
    """
    hidden: Tensor | None = args[0] if args else kwargs.get("attention_mask")
    ends_at_documents = _ends_at_documents()
    # Later pipeline stages get no mask, so they could not end attention at documents.
    lacks_mask = ends_at_documents and hidden is None
    if not _is_causal(attention) or lacks_mask or has_bias_or_packing(args, kwargs):
        softmax = getattr(attention.config, "softmax_type", "vanilla")
        raise NotImplementedError(
            f"Context parallelism without Transformer Engine knows plain causal attention, not "
            f"{attention.attn_mask_type} with window {attention.config.window_size} and softmax "
            f"'{softmax}', no bias, no packed sequences, "
            "and --reset-attention-mask only where a mask is given."
        )
    return hidden if ends_at_documents else None


def _find_packed(attention: Any, query: Tensor, kwargs: dict[str, Any]) -> Any:
    """Return the packed sequence's parameters if this patch computes its attention, else None.

    CPU ranks compute plain causal attention within documents. `kwargs` are the keyword arguments of `forward`.
    """
    packed = kwargs.get("packed_seq_params")
    if packed is None or packed.qkv_format != "thd" or query.is_cuda:
        return None
    return packed if _is_causal(attention) and not attention.config.multi_latent_attention else None


def _attend_to_documents(
    attention: Any,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: Any,
) -> Tensor:
    """Return causal attention within the documents of a packed sequence, [tokens, 1, heads·width].

    Transformer Engine has kernels for packed sequences. Here Megatron's own `forward` (`original`) computes the
    attention over the whole sequence, with a mask that hides other documents.

    Args:
        attention: The `DotProductAttention`.
        original: Its `forward`.
        query: Queries of this rank's tokens, [tokens, heads, width].
        key: Their keys.
        value: Their values.
        packed: Megatron's `PackedSeqParams`.
    """
    from megatron.core import parallel_state, tensor_parallel

    inputs = [tensor.unsqueeze(1) for tensor in (query, key, value)]
    rank, ranks = 0, attention.config.context_parallel_size
    if ranks > 1:
        rank = parallel_state.get_context_parallel_group().rank()
    hidden = hidden_outside_documents(packed.cu_seqlens_q, rank, ranks, query.size(0))
    if ranks == 1:
        return original(attention, *inputs, hidden)
    out: Tensor = tensor_parallel.checkpoint(
        functools.partial(_attend_gathered, attention, original), False, *inputs, hidden
    )
    return out


@wrap_original
def _forward(
    original: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Compute attention: by SDPA on GPUs, by Megatron's own code on CPUs, over gathered keys under CP."""
    from megatron.core import tensor_parallel

    packed = _find_packed(self, query, kwargs)
    if packed is not None:
        return _attend_to_documents(self, original, query, key, value, packed)
    if self.config.context_parallel_size == 1:
        # On a GPU the scores of Megatron's own attention would fill the memory.
        if query.is_cuda and is_plain(self) and not has_bias_or_packing(args, kwargs):
            return _attend_with_settings(self, query, key, value, None)
        if self.config.multi_latent_attention:
            # Key and value are parts of one tensor there, but Megatron views each as contiguous rows.
            key, value = key.contiguous(), value.contiguous()
        return original(self, query, key, value, *args, **kwargs)
    hidden = _find_mask(self, args, kwargs)
    # The checkpoint recomputes this part in backward, which gathers K and V a second time.
    out: Tensor = tensor_parallel.checkpoint(
        functools.partial(_attend_gathered, self, original), False, query, key, value, hidden
    )
    return out


PATCH = no_te_patch(
    "attention",
    "Megatron's own attention refuses context parallelism and MLA, and keeps its scores",
    Replacement(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        _initialise,
    ),
    Replacement(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        _forward,
    ),
)
