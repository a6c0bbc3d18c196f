"""Data sets of a run: one, or several that Megatron blends, as `DATA="0.3 a 0.7 b"` and `--data-path` name them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parakit.config.files import ROOT


@dataclass(frozen=True)
class BlendPart:
    """One data set of a run, with its weight if the run blends several data sets."""

    prefix: str
    """Path without suffix, absolute or seen from the repository root."""
    weight: str | None = None
    """Weight of the data set as the user wrote it; None if no data set of the run has one."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The data set as values of Megatron's `--data-path`."""
        return (self.prefix,) if self.weight is None else (self.weight, self.prefix)


def parse_blend(text: str) -> tuple[BlendPart, ...]:
    """Return the data sets that a text names. The result has at least one.

    A text of several words names several data sets if one word is a weight, or if every word is an existing data
    set. Otherwise the full text is the path of one data set.

    Raises:
        ValueError: `pair_weights` refuses the words.
    """
    arguments = split_arguments(text)
    if len(arguments) < 2 or _exists(text):
        return (BlendPart(text),)
    is_blend = any(map(is_weight, arguments)) or all(map(_exists, arguments))
    return pair_weights(arguments) if is_blend else (BlendPart(text),)


def split_arguments(text: str) -> list[str]:
    """Return the arguments in a text as a shell splits it; the text itself if its quotes do not end."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def pair_weights(arguments: Sequence[str]) -> tuple[BlendPart, ...]:
    """Return the data sets of a list that has prefixes alone, or a weight before each prefix.

    Megatron reads `--data-path` in the same way.

    Raises:
        ValueError: Some prefixes have a weight and others have none, or a weight is not above 0.
    """
    if len(arguments) == 1:
        return (BlendPart(arguments[0]),)
    if not any(map(is_weight, arguments)):
        return tuple(BlendPart(prefix) for prefix in arguments)
    text = shlex.join(arguments)
    # In a list with weights, every second argument is one, from the first on.
    weights, prefixes = arguments[::2], arguments[1::2]
    if len(weights) != len(prefixes) or not any(map(is_weight, weights)):
        raise ValueError(f"{text} has a weight without a data set.")
    if not all(map(is_weight, weights)) or any(map(is_weight, prefixes)):
        raise ValueError(f"{text} has no weight before each data set.")
    if any(float(weight) <= 0 for weight in weights):
        raise ValueError(f"{text} has a weight that is not above 0.")
    return tuple(
        BlendPart(prefix, weight) for weight, prefix in zip(weights, prefixes, strict=True)
    )


def format_blend(parts: Iterable[BlendPart]) -> str:
    """Return the text of data sets, which `parse_blend` reads. A single data set is its prefix, without quotes."""
    parts = tuple(parts)
    if len(parts) == 1:
        return parts[0].prefix
    return shlex.join(argument for part in parts for argument in part.arguments)


def _exists(prefix: str) -> bool:
    """Return True if a data set has this path."""
    return Path(f"{ROOT / prefix}.idx").is_file()


def is_weight(text: str) -> bool:
    """Return True if Megatron reads the text as a weight."""
    try:
        float(text)
    except ValueError:
        return False
    return True
