"""Cures packed-rotary-of-document-chunks: each token's position within its document, wherever the token lies."""

import inspect

import torch
from megatron.core.models.common.embeddings import rope_utils as module

rotate = module._apply_rotary_pos_emb_thd
known = inspect.signature(module._apply_rotary_pos_emb_bshd).parameters


def by_token(t, cu_seqlens, freqs, cp_group=None, **options):
    ranks, chunk = cp_group.size(), t.size(0) // 2
    if ranks == 1:
        return rotate(t, cu_seqlens, freqs, cp_group=cp_group, **options)
    first, last = cp_group.rank() * chunk, (2 * ranks - 1 - cp_group.rank()) * chunk
    positions = torch.cat([torch.arange(start, start + chunk) for start in (first, last)])
    positions = positions.to(cu_seqlens)
    documents = torch.bucketize(positions, cu_seqlens[1:], right=True)
    of_tokens = freqs[(positions - cu_seqlens[documents]).long()]
    options = {name: value for name, value in options.items() if name in known}
    return module._apply_rotary_pos_emb_bshd(t.unsqueeze(1), of_tokens, **options).squeeze(1)


module._apply_rotary_pos_emb_thd = by_token
