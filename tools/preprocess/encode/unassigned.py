"""Characters that Python's Unicode tables leave unassigned: where libraries may disagree."""

from __future__ import annotations

import functools
import json
import sys
import unicodedata

import numpy as np
from numpy.typing import NDArray

from tools.preprocess.encode.tokenizer import TokenizerSpec

Flags = NDArray[np.bool_]

_STRIDE = 1 << 20
_CONTINUATION_BITS = 6
"""Of a code point, in each byte of UTF-8 but the first."""


def has_unassigned(text: str) -> bool:
    """Whether a text holds such a character."""
    if text.isascii():
        return False
    for start in range(0, len(text), _STRIDE):
        codes = np.frombuffer(text[start : start + _STRIDE].encode("utf-32-le"), np.uint32)
        if _unassigned().take(codes).any():
            return True
    return False


@functools.cache
def tokens_to_check(spec: TokenizerSpec) -> Flags | None:
    """For each id whether its token may hold the first byte of an unassigned character.

    None if a token's bytes are not known, which they are only of byte-level tokenizers without a
    normalizer. No text with such a character is without such a token.
    """
    definition = json.loads(spec.definition)
    entries = definition["model"]["vocab"]
    is_byte_level = "ByteLevel" in json.dumps(definition.get("pre_tokenizer"))
    if definition.get("normalizer") or not is_byte_level or not isinstance(entries, dict):
        return None
    tokens = definition.get("added_tokens") or []
    added = {token["content"]: int(token["id"]) for token in tokens}
    flags = np.zeros(max([*entries.values(), *added.values()]) + 1, dtype=bool)
    alphabet = _byte_alphabet()
    for token, id_ in entries.items():
        known = all(letter in alphabet for letter in token)
        flags[id_] = not known or _may_hold_unassigned(bytes(alphabet[x] for x in token))
    for token, id_ in added.items():
        flags[id_] = has_unassigned(token)
    return flags


@functools.cache
def _unassigned() -> Flags:
    """For each code point."""
    categories = (unicodedata.category(chr(code)) for code in range(sys.maxunicode + 1))
    return np.fromiter((category == "Cn" for category in categories), bool, sys.maxunicode + 1)


def _may_hold_unassigned(token: bytes) -> bool:
    """Whether a character that begins in this token is unassigned, or may be by its other bytes."""
    for start, first in enumerate(token):
        if first < 0xC2:  # ASCII, or a later byte of a character
            continue
        length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        seen = token[start : start + length]
        code = first & (0x7F >> length)
        for byte in seen[1:]:
            code = code << _CONTINUATION_BITS | byte & 0x3F
        missing = _CONTINUATION_BITS * (length - len(seen))
        if _unassigned()[code << missing : (code + 1) << missing].any():
            return True
    return False


def _byte_alphabet() -> dict[str, int]:
    """Which letter stands for which byte in a byte-level vocabulary: itself, if it can be printed."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
