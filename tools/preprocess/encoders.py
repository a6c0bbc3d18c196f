"""Encode texts into ids: with gigatoken if it knows the tokenizer, else with Hugging Face `tokenizers`.

Libraries have Unicode tables of different years. The tables decide which characters are letters, and thereby where
GPT-2 cuts a text. So texts with characters that are unassigned in Python's tables are encoded as Megatron encodes
them. For GPT-2 that is the package `regex`, for other tokenizers `tokenizers`.
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
"""Characters per batch of `tokenizers`, which keeps over 100 bytes per token of a batch."""
_PIECES = 1 << 16
"""Words per batch of `tokenizers`, if `regex` has cut the text."""
_CHECKED_CHARACTERS = 1 << 14
"""Characters from the start of each document that two encoders encode to be compared."""
_STRIDE = 1 << 20
"""Characters that are checked at a time; each takes four bytes."""
_CACHE_BYTES = 224 << 20
"""Growth of the process's memory, in bytes, from which gigatoken's cache is dropped."""
_LEAST_CHARACTERS = 16 << 20
"""Characters that are encoded at least between two drops of the cache, however large the process is."""


class Encoder(Protocol):
    """Encoder of texts into ids; several threads may call it, and each call stays on its thread."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode texts into one flat array; text i is `ids[offsets[i]:offsets[i + 1]]`."""


class GigatokenEncoder:
    """Byte-pair encoder of `gigatoken`.

    Raises:
        Exception: gigatoken does not know the tokenizer. The error may have any type.
    """

    name = "gigatoken"

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec
        self._prefix, self._suffix = _find_special_tokens(spec)
        self._native = _load_gigatoken(spec)
        self._most_bytes = _resident_bytes() + _CACHE_BYTES
        self._since_load = 0
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode texts into one flat array, as `Encoder.encode` describes."""
        native = self._get_native(size=sum(map(len, texts)))
        layout = native.encode_batch(texts, parallel=False).layout
        ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        if not len(self._prefix) and not len(self._suffix):
            return ids, offsets
        rows = []
        for row in _split_rows(ids, offsets):
            rows.append(np.concatenate((self._prefix, row, self._suffix)))
        return _join_rows(rows)

    def _get_native(self, size: int) -> Any:
        """Return the native tokenizer. If its cache of words has grown too large, load a new one first.

        The cache of the native tokenizer has no limit. With 160 MB of random words it took 1 GiB.

        Args:
            size: Number of characters that will be encoded next.
        """
        with self._lock:
            self._since_load += size
            may_reload = self._since_load > _LEAST_CHARACTERS
            if may_reload and _resident_bytes() > self._most_bytes:
                self._native = _load_gigatoken(self._spec)
                self._since_load = 0
            return self._native


class HuggingFaceEncoder:
    """Encoder that uses Hugging Face `tokenizers`, for any tokenizer. It is slow, and the reference for others."""

    name = "tokenizers"

    def __init__(self, spec: TokenizerSpec) -> None:
        self._tokenizer = _load_hugging_face(spec)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode texts into one flat array, as `Encoder.encode` describes."""
        rows: list[Ids] = []
        batch_start = 0
        batch_characters = 0
        for end, text in enumerate(texts, start=1):
            batch_characters += len(text)
            if batch_characters >= _HF_BATCH_CHARACTERS or end == len(texts):
                encodings = self._tokenizer.encode_batch_fast(texts[batch_start:end])
                rows += [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
                batch_start, batch_characters = end, 0
        return _join_rows(rows)


@functools.cache
def megatrons_own(spec: TokenizerSpec) -> Callable[[str], Ids]:
    """Return a slow function that encodes a text exactly as Megatron does.

    For GPT-2, Megatron cuts a text into words with the package `regex`, and so does this function.
    """
    if spec.name != GPT2:
        return lambda text: _hugging_face(spec).encode([text])[0]
    import regex
    from tokenizers import pre_tokenizers

    word_pattern = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    merges = _load_hugging_face(spec)
    merges.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def encode(text: str) -> Ids:
        pieces = (match.group() for match in word_pattern.finditer(text))
        ids = [np.empty(0, np.uint32)]
        for batch in batched(pieces, _PIECES):
            encoding = merges.encode(batch, is_pretokenized=True)
            ids.append(np.array(encoding.ids, np.uint32))
        return np.concatenate(ids)

    return encode


class ExactEncoder:
    """Encoder that is as fast as another encoder, and encodes rare characters as Megatron does.

    The Unicode tables of the fast encoder may be of another year than Megatron's. Texts with characters that are
    unassigned in Python's tables are therefore encoded by `megatrons_own`.
    """

    def __init__(self, fast: Encoder, spec: TokenizerSpec) -> None:
        self.name = fast.name
        self._fast = fast
        self._spec = spec

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Encode texts into one flat array, as `Encoder.encode` describes."""
        ids, offsets = self._fast.encode(texts)
        rare = [index for index, text in enumerate(texts) if has_unassigned(text)]
        if not rare:
            return ids, offsets
        rows = _split_rows(ids, offsets)
        for index in rare:
            rows[index] = megatrons_own(self._spec)(texts[index])
        return _join_rows(rows)


def has_unassigned(text: str) -> bool:
    """Return True if a text holds characters that are unassigned in Python's Unicode tables."""
    if text.isascii():
        return False
    first, unassigned = _find_unassigned()
    for start in range(0, len(text), _STRIDE):
        codes = np.frombuffer(text[start : start + _STRIDE].encode("utf-32-le"), np.uint32)
        if unassigned.take(codes[codes >= first]).any():
            return True
    return False


@functools.cache
def _find_unassigned() -> tuple[int, NDArray[np.bool_]]:
    """Return the first unassigned code point, and for each code point whether it is unassigned."""
    points = range(sys.maxunicode + 1)
    flags = np.array([unicodedata.category(chr(point)) == "Cn" for point in points])
    return int(flags.argmax()), flags


def choose_encoder(spec: TokenizerSpec, samples: Sequence[str], say: Say) -> Encoder:
    """Choose between the fast encoder of gigatoken and the slow encoder of `tokenizers`, and return it.

    The fast encoder is chosen if it knows the tokenizer and encodes all samples as `tokenizers` does. Otherwise `say`
    is called with the reason, and the slow encoder is returned.
    """
    problem = _find_gigatoken_problem(spec, samples)
    if problem is None:
        return ExactEncoder(_gigatoken(spec), spec)
    say(f"Encoding with tokenizers: {problem}")
    slow = _hugging_face(spec)
    if spec.name == GPT2:
        return ExactEncoder(slow, spec)
    return slow  # For other tokenizers, Megatron itself encodes with `tokenizers`.


def _find_gigatoken_problem(spec: TokenizerSpec, samples: Sequence[str]) -> str | None:
    """Return a sentence with the reason why gigatoken cannot be used, or None if it can be used.

    Only the first `_CHECKED_CHARACTERS` characters of each sample are compared.
    """
    if any(token.get("single_word") for token in spec.added_tokens):
        return f"gigatoken does not honour single_word of '{spec.name}'."
    try:
        fast = _gigatoken(spec)
    except Exception as error:
        return f"gigatoken does not know '{spec.name}' ({str(error).strip().splitlines()[0]})."
    texts = [text[:_CHECKED_CHARACTERS] for text in samples] + _make_probes(spec)
    # Texts with unassigned characters are never given to the fast encoder (see `ExactEncoder`).
    compared = [text for text in texts if not has_unassigned(text)]
    if not compared:
        return None
    differing_text = first_difference(fast, _hugging_face(spec), compared)
    if differing_text is None:
        return None
    return f"gigatoken encodes {differing_text[:60]!r} differently."


def first_difference(encoder: Encoder, other: Encoder, texts: Sequence[str]) -> str | None:
    """Return the first text that two encoders encode differently; None if they agree on all."""
    rows, other_rows = _split_rows(*encoder.encode(texts)), _split_rows(*other.encode(texts))
    for text, ids, other_ids in zip(texts, rows, other_rows, strict=True):
        if not np.array_equal(ids, other_ids):
            return text
    return None


def _make_probes(spec: TokenizerSpec) -> list[str]:
    """Return texts that encoders often encode wrongly.

    The list is empty for GPT-2's tokenizer, because the project's tests compare its encoders.
    """
    if spec.name == GPT2:
        return []
    surroundings = ("{}", "a{}b", " a {} b", "\n{}\n")
    around = [
        template.replace("{}", token["content"])
        for token in spec.added_tokens[:64]
        for template in surroundings
    ]
    return ["", " ", " Hello  world's 12345\n\n\tNaïve café — 日本語 😀\r\n", *around]


def _load_gigatoken(spec: TokenizerSpec) -> Any:
    import gigatoken.gigatoken_rs as native  # Not every command encodes.

    return native.load_hf_json(spec.definition)


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _find_special_tokens(spec: TokenizerSpec) -> tuple[Ids, Ids]:
    """Return the special tokens that the post-processor puts before and after each text.

    Both are empty for GPT-2's tokenizer, and for a tokenizer without a post-processor.
    """
    none = np.empty(0, np.uint32)
    if spec.name == GPT2 or not json.loads(spec.definition).get("post_processor"):
        return none, none
    # The file does not state the tokens in one form, so "a" is encoded without and with them.
    tokenizer = _load_hugging_face(spec)
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for start in range(len(full) - len(bare) + 1):
        stop = start + len(bare)
        if full[start:stop] == bare:
            return np.array(full[:start], np.uint32), np.array(full[stop:], np.uint32)
    return np.array(full, np.uint32), none


_gigatoken = functools.cache(GigatokenEncoder)
_hugging_face = functools.cache(HuggingFaceEncoder)


def _load_hugging_face(spec: TokenizerSpec) -> Any:
    # The pipeline's threads keep all cores busy. `tokenizers` reads the variable at its first batch.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers  # Not every command encodes.

    tokenizer = tokenizers.Tokenizer.from_str(spec.definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _split_rows(ids: Ids, offsets: Offsets) -> list[Ids]:
    """Return the ids of each text, from the flat array of all ids."""
    return [ids[start:end] for start, end in pairwise(offsets.tolist())]


def _join_rows(rows: Sequence[Ids]) -> tuple[Ids, Offsets]:
    """Return the ids of all texts as one flat array, and the offset of each text in it."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.concatenate([np.empty(0, np.uint32), *rows]), offsets
