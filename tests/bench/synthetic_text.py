"""Synthetic text of any size from a seed, for benchmarks and memory tests.

`english` draws words by frequency from the prose that Python ships, with a long tail of invented words like in real
text, so that an encoder cannot cache all words. `unseen` has words of random letters in eight scripts in turn.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tools.preprocess.cli import sample_documents

_SCRIPTS = (
    (0x00DF, 0x017F, " "),  # Latin with accents
    (0x03B1, 0x03CA, " "),  # Greek
    (0x0430, 0x0450, " "),  # Cyrillic
    (0x0621, 0x063B, " "),  # Arabic
    (0x0905, 0x093A, " "),  # Devanagari
    (0x3041, 0x3097, "、"),  # Hiragana
    (0x4E00, 0x9FA6, "，"),  # Chinese
    (0xAC00, 0xD7A4, " "),  # Korean
)
"""First and last letter (exclusive), and the separator of words."""
_UNSEEN_CHARACTERS = 2000
_UNSEEN_WORD = 7
"""Mean number of characters of a word with its separator."""
_TAIL_WORDS = 200_000
_TAIL_SHARE = 0.04
"""Fraction of drawn words that are invented."""
_SYLLABLES = (
    "al an ar as at be ca ce ci co con de di el en er es et fa fi for ga ge gra ha he hi in is ka "
    "la le li lo ma me mi mo na ne ni no ob or pa pe per pi po pre qua ra re ri ro sa se si so sta "
    "su ta te ti to tra tri un ur va ve vi za"
)
_MOST_SYLLABLES = 5
_MEAN_WORDS = 780
"""Mean number of words per document, close to OpenWebText's 4.9 kB."""


def synthetic_documents(size_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yield English-like documents of at least `size_bytes` in total, with log-normal lengths."""
    random = np.random.default_rng(seed)
    vocabulary, cumulative = _vocabulary()
    written = 0
    while written < size_bytes:
        count = max(3, int(random.lognormal(np.log(_MEAN_WORDS) - 0.5, 1.0)))
        drawn = np.searchsorted(cumulative[:-1], random.random(count))
        text = "".join([vocabulary[i] for i in drawn.tolist()]).strip()
        written += len(text)
        yield text


def unseen_documents(size_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yield documents of at least `size_bytes` of UTF-8 in total, each in one of eight scripts."""
    random = np.random.default_rng(seed)
    written = 0
    for low, high, space in cycle(_SCRIPTS):
        codes = random.integers(low, high, _UNSEEN_CHARACTERS).astype("<u4")
        codes[random.random(len(codes)) < 1 / _UNSEEN_WORD] = ord(space)
        text = codes.tobytes().decode("utf-32-le")
        written += len(text.encode())
        yield text
        if written >= size_bytes:
            return


TEXTS = {"english": synthetic_documents, "unseen": unseen_documents}


def write_synthetic(path: Path, size_bytes: int, seed: int = 0, text: str = "english") -> None:
    """Write JSON lines of at least `size_bytes` of one of the `TEXTS`."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as stream:
        for document in TEXTS[text](size_bytes, seed):
            stream.write(encode({"text": document}) + b"\n")


@functools.cache
def _vocabulary() -> tuple[list[str], NDArray[np.float64]]:
    """Return words with a leading space, and their cumulative frequencies."""
    word_counts = Counter(re.findall(r"[A-Za-z']+[.,;:]?", " ".join(sample_documents())))
    vocabulary = [f" {word}" + ("\n\n" if word.endswith(":") else "") for word in word_counts]
    syllables = np.array(_SYLLABLES.split())
    random = np.random.default_rng(0)
    drawn = syllables[random.integers(0, len(syllables), (_TAIL_WORDS, _MOST_SYLLABLES))].tolist()
    counts = random.integers(2, _MOST_SYLLABLES + 1, _TAIL_WORDS).tolist()
    vocabulary += [" " + "".join(word[:count]) for word, count in zip(drawn, counts, strict=True)]
    common = np.array(list(word_counts.values())) / word_counts.total()
    rare = 1.0 / np.arange(1, _TAIL_WORDS + 1)
    weights = [common * (1 - _TAIL_SHARE), rare / rare.sum() * _TAIL_SHARE]
    return vocabulary, np.cumsum(np.concatenate(weights))
