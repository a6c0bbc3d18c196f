"""Encoders that turn texts into ids: gigatoken where it knows the tokenizer, else `tokenizers`.

Libraries carry Unicode tables of different years, and these decide what a letter is, so where GPT-2 cuts
a text. Texts with characters that Python's own tables leave unassigned are therefore encoded by what
Megatron itself uses: for GPT-2 the package `regex`, for other tokenizers `tokenizers`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import unicodedata
from collections.abc import Callable, Sequence
from itertools import batched, pairwise
from typing import Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from tools.preprocess.tokenizer import GPT2, TokenizerSpec

Ids = NDArray[np.uint32]
Offsets = NDArray[np.int64]
Say = Callable[[str], None]

_HF_BATCH_CHARACTERS = 1 << 19
"""Text given to `tokenizers` at a time: it keeps over 100 bytes for each token of a batch."""
_PIECES = 1 << 16
"""Words given to it at a time where `regex` has cut a text."""
_CHECKED_CHARACTERS = 1 << 14
"""Of each document that is encoded twice, this much from its start."""
_STRIDE = 1 << 20
"""Characters looked at together: each takes four bytes."""
_CACHE_BYTES = 224 << 20
"""Growth of the process's memory at which gigatoken's cache is dropped."""
_LEAST_CHARACTERS = 16 << 20
"""Encoded between two such drops, however large the process is for other reasons."""


class Encoder(Protocol):
    """Texts in, ids out. Safe to call from several threads; each call stays on its thread."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode texts into one flat array; text i is `ids[offsets[i]:offsets[i + 1]]`."""


class GigatokenEncoder:
    """Byte-pair encoding by `gigatoken`.

    Raises:
        Exception: It does not know the tokenizer; of which type is gigatoken's own affair.
    """

    name = "gigatoken"

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._prefix, self._suffix = _template(spec)
        self._native = _load_gigatoken(spec)
        self._most_bytes = _resident_bytes() + _CACHE_BYTES
        self._since_load = 0
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """See `Encoder.encode`."""
        layout = self._bounded(sum(map(len, texts))).encode_batch(texts, parallel=False).layout
        ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        if len(self._prefix) + len(self._suffix):
            rows = _rows(ids, offsets)
            return _flat([np.concatenate((self._prefix, row, self._suffix)) for row in rows])
        return ids, offsets

    def _bounded(self, size: int) -> Any:
        """The native tokenizer; a fresh one once its cache of words has grown too large.

        The cache has no bound of its own: 160 MB of random words made it take 1 GiB.
        """
        with self._lock:
            self._since_load += size
            if self._since_load > _LEAST_CHARACTERS and _resident_bytes() > self._most_bytes:
                self._native = _load_gigatoken(self._spec)
                self._since_load = 0
            return self._native


class HuggingFaceEncoder:
    """Any tokenizer, by Hugging Face `tokenizers`: slower, but the reference."""

    name = "tokenizers"

    def __init__(self, spec: TokenizerSpec) -> None:
        self._tokenizer = _load_hugging_face(spec)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """See `Encoder.encode`."""
        rows: list[Ids] = []
        start = size = 0
        for end, text in enumerate(texts, start=1):
            size += len(text)
            if size >= _HF_BATCH_CHARACTERS or end == len(texts):
                found = self._tokenizer.encode_batch_fast(texts[start:end])
                rows += [np.array(encoding.ids, dtype=np.uint32) for encoding in found]
                start, size = end, 0
        return _flat(rows)


@functools.cache
def megatrons_own(spec: TokenizerSpec) -> Callable[[str], Ids]:
    """What Megatron encodes a text with: GPT-2's it cuts by the package `regex`. Slow, for few texts."""
    if spec.name != GPT2:
        return lambda text: _hugging_face(spec).encode([text])[0]
    import regex
    from tokenizers import pre_tokenizers

    cuts = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    merges = _load_hugging_face(spec)
    merges.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def encode(text: str) -> Ids:
        pieces = (match.group() for match in cuts.finditer(text))
        ids = [
            np.array(merges.encode(some, is_pretokenized=True).ids, np.uint32)
            for some in batched(pieces, _PIECES)
        ]
        return np.concatenate([np.empty(0, np.uint32), *ids])

    return encode


class ExactEncoder:
    """A fast encoder whose Unicode tables may be of another year than the reference's."""

    def __init__(self, fast: Encoder, spec: TokenizerSpec) -> None:
        self.name = fast.name
        self._fast = fast
        self._spec = spec

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """See `Encoder.encode`."""
        ids, offsets = self._fast.encode(texts)
        rare = [index for index, text in enumerate(texts) if has_unassigned(text)]
        if not rare:
            return ids, offsets
        rows = _rows(ids, offsets)
        for index in rare:
            rows[index] = megatrons_own(self._spec)(texts[index])
        return _flat(rows)


def has_unassigned(text: str) -> bool:
    """Whether a text holds characters that Python's tables leave unassigned."""
    if text.isascii():
        return False
    first, unassigned = _unassigned()
    for start in range(0, len(text), _STRIDE):
        codes = np.frombuffer(text[start : start + _STRIDE].encode("utf-32-le"), np.uint32)
        if unassigned.take(codes[codes >= first]).any():
            return True
    return False


@functools.cache
def _unassigned() -> tuple[int, NDArray[np.bool_]]:
    """The first such code point; and for each code point whether it is one."""
    points = range(sys.maxunicode + 1)
    flags = np.array([unicodedata.category(chr(point)) == "Cn" for point in points])
    return int(flags.argmax()), flags


def choose_encoder(spec: TokenizerSpec, samples: Sequence[str], say: Say) -> Encoder:
    """The fast encoder if it knows the tokenizer and agrees with `tokenizers` on all samples.

    `say` is called whenever the slow encoder has to do the work, with the reason.
    """
    if (reason := _unfit(spec, samples)) is None:
        return ExactEncoder(_gigatoken(spec), spec)
    say(f"Encoding with tokenizers: {reason}")
    slow = _hugging_face(spec)
    return ExactEncoder(slow, spec) if spec.name == GPT2 else slow


def _unfit(spec: TokenizerSpec, samples: Sequence[str]) -> str | None:
    """Why gigatoken cannot do the work."""
    if any(token.get("single_word") for token in spec.added_tokens):
        return f"gigatoken does not honour single_word of '{spec.name}'."
    try:
        fast = _gigatoken(spec)
    except Exception as error:
        return f"gigatoken does not know '{spec.name}' ({str(error).strip().splitlines()[0]})."
    texts = [text[:_CHECKED_CHARACTERS] for text in samples] + _probes(spec)
    texts = [text for text in texts if not has_unassigned(text)]
    found = first_difference(fast, _hugging_face(spec), texts) if texts else None
    return None if found is None else f"gigatoken encodes {found[:60]!r} differently."


def first_difference(one: Encoder, other: Encoder, texts: Sequence[str]) -> str | None:
    """The first text that two encoders do not agree on."""
    found = zip(texts, _rows(*one.encode(texts)), _rows(*other.encode(texts)), strict=True)
    return next((text for text, ours, theirs in found if not np.array_equal(ours, theirs)), None)


def _probes(spec: TokenizerSpec) -> list[str]:
    """Texts that show what encoders tend to get wrong in tokenizers other than the tested GPT-2."""
    if spec.name == GPT2:
        return []
    surroundings = ("{}", "a{}b", " a {} b", "\n{}\n")
    around = [
        place.replace("{}", token["content"])
        for token in spec.added_tokens[:64]
        for place in surroundings
    ]
    return ["", " ", " Hello  world's 12345\n\n\tNaïve café — 日本語 😀\r\n", *around]


def _load_gigatoken(spec: TokenizerSpec) -> Any:
    import gigatoken.gigatoken_rs as native  # not every command encodes

    return native.load_hf_json(spec.definition)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _template(spec: TokenizerSpec) -> tuple[Ids, Ids]:
    """Special tokens that the post-processor puts before and after each text."""
    bare: list[int] = []
    full: list[int] = []
    if spec.name != GPT2 and json.loads(spec.definition).get("post_processor"):
        tokenizer = _load_hugging_face(spec)
        bare, full = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    starts = range(len(full) - len(bare) + 1)
    start = next((at for at in starts if full[at : at + len(bare)] == bare), len(full))
    return np.array(full[:start], np.uint32), np.array(full[start + len(bare) :], np.uint32)


_gigatoken = functools.cache(GigatokenEncoder)
_hugging_face = functools.cache(HuggingFaceEncoder)


def _load_hugging_face(spec: TokenizerSpec) -> Any:
    # The pipeline's own threads keep all cores busy; the setting is read at the first batch.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers  # only where it is needed

    tokenizer = tokenizers.Tokenizer.from_str(spec.definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _rows(ids: Ids, offsets: Offsets) -> list[Ids]:
    return [ids[start:end] for start, end in pairwise(offsets.tolist())]


def _flat(rows: Sequence[Ids]) -> tuple[Ids, Offsets]:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.concatenate([np.empty(0, np.uint32), *rows]), offsets
