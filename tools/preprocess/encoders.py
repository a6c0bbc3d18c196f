"""Encoders that turn texts into ids: gigatoken where it knows the tokenizer, else `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tools.preprocess.tokenizer import TokenizerSpec

Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]

_HF_BATCH_BYTES = 1 << 19
"""Texts given to `tokenizers` at a time: it keeps over 100 bytes for each token of a batch."""


class Encoder(Protocol):
    """Texts in, ids out. Safe to call from several threads."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode texts into one flat array; text i is `ids[offsets[i]:offsets[i + 1]]`."""


class GigatokenEncoder:
    """Byte-pair encoding by `gigatoken`, on the calling thread."""

    name = "gigatoken"

    def __init__(self, spec: TokenizerSpec) -> None:
        import gigatoken.gigatoken_rs as native  # noqa: PLC0415

        self._tokenizer = native.load_hf_json(spec.definition)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """See `Encoder.encode`."""
        layout = self._tokenizer.encode_batch(texts, parallel=False).layout
        return np.asarray(layout.content.data), np.asarray(layout.offsets.data)


class HuggingFaceEncoder:
    """Any tokenizer, by Hugging Face `tokenizers`: slower, but the reference."""

    name = "tokenizers"

    def __init__(self, spec: TokenizerSpec) -> None:
        import tokenizers  # noqa: PLC0415

        self._tokenizer: Any = tokenizers.Tokenizer.from_str(spec.definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """See `Encoder.encode`."""
        rows = [row for batch in _batches(texts) for row in self._encode_batch(batch)]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return np.concatenate([np.empty(0, np.uint32), *rows]), offsets

    def _encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast(texts)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _batches(texts: Sequence[str]) -> list[Sequence[str]]:
    batches: list[Sequence[str]] = []
    start = size = 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= _HF_BATCH_BYTES or end == len(texts):
            batches.append(texts[start:end])
            start, size = end, 0
    return batches


def choose_encoder(spec: TokenizerSpec) -> Encoder:
    """The fastest encoder that knows the tokenizer."""
    try:
        return GigatokenEncoder(spec)
    except Exception:
        return HuggingFaceEncoder(spec)
