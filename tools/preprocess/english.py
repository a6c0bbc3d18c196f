"""English-like text of any size, made from a seed: what benchmarks and memory tests run on.

Words are drawn by frequency from the prose that Python carries, with a long tail of invented ones,
as real text has: an encoder that remembers words must not find them all.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tools.preprocess.sample import sample_documents

_TAIL_WORDS = 200_000
_TAIL_SHARE = 0.04
"""Of all words drawn."""
_SYLLABLES = (
    "al an ar as at be ca ce ci co con de di el en er es et fa fi for ga ge gra ha he hi in is ka "
    "la le li lo ma me mi mo na ne ni no ob or pa pe per pi po pre qua ra re ri ro sa se si so sta "
    "su ta te ti to tra tri un ur va ve vi za"
)
_MOST_SYLLABLES = 5
_MEAN_WORDS = 780
"""Of a document: near OpenWebText's 4.9 kB."""


def english_documents(size_bytes: int, seed: int = 0) -> Iterator[str]:
    """Documents of together at least `size_bytes`, log-normal in length."""
    random = np.random.default_rng(seed)
    words, cumulative = _vocabulary()
    written = 0
    while written < size_bytes:
        count = max(3, int(random.lognormal(np.log(_MEAN_WORDS) - 0.5, 1.0)))
        drawn = np.searchsorted(cumulative[:-1], random.random(count))
        text = "".join([words[i] for i in drawn.tolist()]).strip()
        written += len(text)
        yield text


def write_english(path: Path, size_bytes: int, seed: int = 0) -> None:
    """Write JSON lines of at least `size_bytes` of text."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as stream:
        for text in english_documents(size_bytes, seed):
            stream.write(encode({"text": text}) + b"\n")


@functools.cache
def _vocabulary() -> tuple[list[str], NDArray[np.float64]]:
    """Words with the space before them, and their cumulative frequencies."""
    found = Counter(re.findall(r"[A-Za-z']+[.,;:]?", " ".join(sample_documents())))
    words = [f" {word}" + ("\n\n" if word.endswith(":") else "") for word in found]
    syllables = np.array(_SYLLABLES.split())
    random = np.random.default_rng(0)
    drawn = syllables[random.integers(0, len(syllables), (_TAIL_WORDS, _MOST_SYLLABLES))].tolist()
    counts = random.integers(2, _MOST_SYLLABLES + 1, _TAIL_WORDS).tolist()
    words += [" " + "".join(word[:count]) for word, count in zip(drawn, counts, strict=True)]
    common = np.array(list(found.values())) / found.total()
    rare = 1.0 / np.arange(1, _TAIL_WORDS + 1)
    weights = [common * (1 - _TAIL_SHARE), rare / rare.sum() * _TAIL_SHARE]
    return words, np.cumsum(np.concatenate(weights))
