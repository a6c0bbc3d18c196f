"""Reasons why a run cannot train on a data set: its vocabulary, its length, and how `--split` divides it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parakit.data.indexed import Dataset, DatasetError, largest_token
from parakit.data.split import (
    EVAL_ITERATIONS_FLAG,
    SPLIT_FLAG,
    Split,
    divide_into_parts,
    sizes_sentence,
    usable_split_flags,
)


@dataclass(frozen=True)
class DatasetUse:
    """Requirements of a run on its data set."""

    name: str
    """Data set as the user named it."""
    model: str
    vocabulary: int
    """Entries of the model's vocabulary."""
    takes_smaller_vocabulary: bool
    """True if the data set's vocabulary may have fewer entries than the model's."""
    seq_length: int
    split: str
    """Value of `--split`."""
    eval_iterations: int
    """Value of `--eval-iters`; 0 evaluates nothing."""
    reaches_evaluation: bool
    """True if the run is long enough to evaluate once."""


def dataset_problems(dataset: Dataset, use: DatasetUse) -> Iterator[str]:
    """Yield a sentence with its remedy for each reason why a run cannot train on a data set."""
    yield from _vocabulary_problems(dataset, use)
    if dataset.tokens <= use.seq_length:
        yield (
            f"Data set {use.name} has {dataset.tokens} tokens, less than one sequence of "
            f"{use.seq_length}; prepare a longer one with 'make prepare-ds'."
        )
    else:
        yield from _split_problems(dataset, use)


def _vocabulary_problems(dataset: Dataset, use: DatasetUse) -> Iterator[str]:
    """Yield a sentence if the data set was made with another vocabulary than the model has.

    A smaller vocabulary is no problem for a run that accepts one (`use.takes_smaller_vocabulary`). Without a manifest
    the vocabulary is unknown. A sentence is then yielded only if a sample of the tokens has an id outside the model's
    vocabulary.
    """
    vocabulary = dataset.vocabulary
    largest = largest_token(dataset) if vocabulary is None else 0
    fits = use.takes_smaller_vocabulary and (vocabulary or 0) <= use.vocabulary
    fix = "prepare it with the model's tokenizer, or name another with DATA=."
    if vocabulary not in (None, use.vocabulary) and not fits:
        yield (
            f"Data set {use.name} was made with a vocabulary of {vocabulary}, but "
            f"{use.model} has {use.vocabulary}; {fix}"
        )
    elif largest >= use.vocabulary:
        yield (
            f"Data set {use.name} holds token {largest}, beyond {use.model}'s vocabulary "
            f"of {use.vocabulary}; {fix}"
        )


def _split_problems(dataset: Dataset, use: DatasetUse) -> Iterator[str]:
    """Yield a sentence for each reason why the run cannot use the parts into which `--split` divides the data
    set.
    """
    split, length, evaluates = use.split, use.seq_length, use.eval_iterations > 0
    try:
        parts = divide_into_parts(dataset, split)
    except DatasetError as error:
        yield str(error)
        return
    unusable = [part for part in parts if part.is_unusable(length, evaluates)]
    if unusable:
        name = unusable[0].name
        reason = (
            f"is shorter than one sample of {length + 1:,} tokens, which {EVAL_ITERATIONS_FLAG} 0 "
            "forbids"
            if unusable[0].tokens
            else "has nothing that Megatron could draw a sample from"
        )
        usable = " ".join(usable_split_flags(dataset, length, evaluates))
        fix = f"set EXTRA='{usable}', or " if usable else ""
        yield (
            f"{SPLIT_FLAG} {split} divides data set {use.name} into {sizes_sentence(parts)}: the "
            f"{name} part {reason}; {fix}prepare more documents."
        )
    if evaluates and use.reaches_evaluation and parts[Split.VALIDATION].weight == 0:
        yield (
            f"{SPLIT_FLAG} {split} leaves no validation part, and {EVAL_ITERATIONS_FLAG} "
            f"{use.eval_iterations} evaluates on it; add {EVAL_ITERATIONS_FLAG} 0 to EXTRA=, or "
            "give the part a weight."
        )
