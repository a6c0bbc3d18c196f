"""Reasons why a run cannot train on a data set: its vocabulary, its length, and how `--split` divides it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parakit.data.indexed import Dataset, DatasetError, largest_token
from parakit.data.split import (
    EVAL_ITERATIONS_FLAG,
    SPLIT_FLAG,
    DatasetPart,
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
    fix = "prepare it with the model's tokenizer, or name another with DATA=."
    if dataset.vocabulary is None:
        largest = largest_token(dataset)
        if largest >= use.vocabulary:
            yield (
                f"Data set {use.name} holds token {largest}, beyond {use.model}'s vocabulary "
                f"of {use.vocabulary}; {fix}"
            )
        return
    is_accepted = dataset.vocabulary == use.vocabulary
    if use.takes_smaller_vocabulary:
        is_accepted = dataset.vocabulary <= use.vocabulary
    if not is_accepted:
        yield (
            f"Data set {use.name} was made with a vocabulary of {dataset.vocabulary}, but "
            f"{use.model} has {use.vocabulary}; {fix}"
        )


def _split_problems(dataset: Dataset, use: DatasetUse) -> Iterator[str]:
    """Yield a sentence for each reason why the run cannot use the parts into which `--split` divides the data
    set.
    """
    evaluates = use.eval_iterations > 0
    try:
        parts = divide_into_parts(dataset, use.split)
    except DatasetError as error:
        yield str(error)
        return
    for part in parts:
        if part.is_unusable(use.seq_length, evaluates):
            usable_flags = usable_split_flags(dataset, use.seq_length, evaluates)
            fix = f"set EXTRA='{' '.join(usable_flags)}', or " if usable_flags else ""
            yield (
                f"{SPLIT_FLAG} {use.split} divides data set {use.name} into {sizes_sentence(parts)}: the "
                f"{part.name} part {_explain_unusable(part, use)}; {fix}prepare more documents."
            )
            break  # The remedy is the same for all parts.
    has_validation = parts[Split.VALIDATION].weight > 0
    if evaluates and use.reaches_evaluation and not has_validation:
        yield (
            f"{SPLIT_FLAG} {use.split} leaves no validation part, and {EVAL_ITERATIONS_FLAG} "
            f"{use.eval_iterations} evaluates on it; add {EVAL_ITERATIONS_FLAG} 0 to EXTRA=, or "
            "give the part a weight."
        )


def _explain_unusable(part: DatasetPart, use: DatasetUse) -> str:
    """Return why Megatron cannot use a part of a data set, as the end of a sentence."""
    if not part.tokens:
        return "has nothing that Megatron could draw a sample from"
    return (
        f"is shorter than one sample of {use.seq_length + 1:,} tokens, which {EVAL_ITERATIONS_FLAG} 0 "
        "forbids"
    )
