"""Ids of a block as Megatron stores them: sequences, boundaries, end-of-document tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.preprocess.dataset.index import TokenType
from tools.preprocess.encode.encoders import Encoder, Ids, Offsets
from tools.preprocess.input.documents import Text, utf8_size

Int32s = NDArray[np.int32]
_SHORT_DOCUMENT_TOKENS = 256
"""Below this mean length one masked copy is faster than a copy for each document."""


@dataclass(frozen=True)
class Packed:
    """What one block adds to a data set."""

    tokens: NDArray[Any]
    """Of the data set's dtype."""
    lengths: Int32s
    """Tokens of each sequence."""
    counts: Int32s
    """Sequences of each document; 0 marks an empty one."""
    text_bytes: int
    """UTF-8 bytes of the texts."""


def pack(texts: Sequence[Text], encoder: Encoder, dtype: TokenType, eod: int | None) -> Packed:
    """Encode documents and lay them out as Megatron's script does.

    A text without tokens is no sequence; a document without sequences gets no end-of-document token
    but keeps its boundary. The token belongs to the document's last sequence.
    """
    flat, sentences = _flatten(texts)
    ids, offsets = encoder.encode(flat)
    text_bytes = sum(map(utf8_size, flat))
    lengths = np.diff(offsets).astype(np.int32)
    counts = _sequences_a_document(lengths, sentences)
    lengths = lengths[lengths > 0]
    if eod is None:
        return Packed(ids.astype(dtype), lengths, counts, text_bytes)
    last = np.cumsum(counts)[counts > 0] - 1
    lengths[last] += 1
    ends = np.cumsum(lengths, dtype=np.int64)[last]
    return Packed(_insert(ids, ends, dtype, eod), lengths, counts, text_bytes)


def _flatten(texts: Sequence[Text]) -> tuple[Sequence[str], Int32s | None]:
    """All texts in one list and the number of each document's; None stands for one each."""
    if all(isinstance(text, str) for text in texts):
        return texts, None  # type: ignore[return-value]
    lists = [[text] if isinstance(text, str) else text for text in texts]
    return [text for texts in lists for text in texts], np.array([len(t) for t in lists], np.int32)


def _sequences_a_document(lengths: Int32s, sentences: Int32s | None) -> Int32s:
    filled = (lengths > 0).astype(np.int32)
    if sentences is None:
        return filled
    before = np.concatenate(([0], np.cumsum(filled)))
    ends = np.cumsum(sentences)
    counts: Int32s = (before[ends] - before[ends - sentences]).astype(np.int32)
    return counts


def _insert(ids: Ids, ends: Offsets, dtype: TokenType, eod: int) -> NDArray[Any]:
    """`ids` with `eod` before each of the positions `ends` of the result."""
    tokens = np.empty(len(ids) + len(ends), dtype=dtype)
    places = ends - 1
    if len(ids) < _SHORT_DOCUMENT_TOKENS * len(ends):
        own = np.ones(len(tokens), dtype=bool)
        own[places] = False
        tokens[own] = ids
    else:
        start = 0
        for index, place in enumerate(places.tolist()):
            tokens[start:place] = ids[start - index : place - index]
            start = place + 1
    tokens[places] = eod
    return tokens
