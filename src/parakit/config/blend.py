"""Data sets of a run: one, or several that Megatron blends, as `DATA="0.3 a 0.7 b"` and `--data-path` name them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.config.files import ROOT


@dataclass(frozen=True)
class BlendPart:
    """A data set of a blend, or a run's only data set."""

    prefix: str
    """Path without suffix, absolute or seen from the repository root."""
    weight: str | None = None
    """Weight of the data set as the user wrote it; None if no data set of the run has one."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The data set as values of Megatron's `--data-path`."""
        return (self.prefix,) if self.weight is None else (self.weight, self.prefix)


def parse_blend(text: str) -> tuple[BlendPart, ...]:
    """Return the data sets that a text names, at least one; raises as `pair_weights`.

    A text is one data set if it has no blanks, or if a data set of exactly this name exists.
    """
    if Path(f"{ROOT / text}.idx").is_file():
        return (BlendPart(text),)
    words = shlex.split(text)
    return pair_weights(words) if len(words) > 1 else (BlendPart(text),)


def pair_weights(words: Sequence[str]) -> tuple[BlendPart, ...]:
    """Return the data sets of a list as Megatron reads it: prefixes alone, or a weight before each prefix.

    Raises:
        ValueError: Some prefixes have a weight and others have none, or a weight is not above 0.
    """
    if len(words) == 1:
        return (BlendPart(words[0]),)
    weights, prefixes = words[::2], words[1::2]
    is_weighted = [_is_number(weight) for weight in weights]
    if len(words) % 2 or not any(is_weighted):
        if any(map(_is_number, words)):
            raise ValueError(f"{shlex.join(words)} has a weight without a data set.")
        return tuple(map(BlendPart, words))
    if not all(is_weighted) or any(map(_is_number, prefixes)):
        raise ValueError(f"{shlex.join(words)} has no weight before each data set.")
    if any(float(weight) <= 0 for weight in weights):
        raise ValueError(f"{shlex.join(words)} has a weight that is not above 0.")
    return tuple(
        BlendPart(prefix, weight) for weight, prefix in zip(weights, prefixes, strict=True)
    )


def format_blend(parts: Iterable[BlendPart]) -> str:
    """Return the text of data sets, which `parse_blend` reads. A single data set is its prefix, without quotes."""
    parts = tuple(parts)
    if len(parts) == 1:
        return parts[0].prefix
    return shlex.join(argument for part in parts for argument in part.arguments)


def _is_number(text: str) -> bool:
    """Return True if Megatron reads the text as a weight."""
    try:
        float(text)
    except ValueError:
        return False
    return True
