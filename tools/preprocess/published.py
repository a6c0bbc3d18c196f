"""Whether openwebtext-10k, prepared here, is the data set that the published runs read.

No count of its tokens and no hash was published. The author's log (gpt2-xl over four GPUs, 2025-10-11)
has the documents and the samples that Megatron drew from each split, which follow from their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tools.preprocess.dataset import Dataset

HUB_NAME = "vuiseng9/openwebtext-10k"
SEQ_LENGTH = 1024
SPLIT = (949, 50, 1)
DOCUMENTS = 10_000
ASKED = (2_000_000, 400_040, 40)
"""Samples that the run asked of the training, validation and test split."""
DRAWN = (2_008_302, 400_551, 45)
"""Samples that whole epochs of each had."""


def comparison(dataset: Dataset) -> str:
    """A sentence: this is the published data set, or in what it is not."""
    if dataset.documents != DOCUMENTS:
        return (
            f"Not the published data set: {dataset.documents:,} documents instead of {DOCUMENTS:,}; "
            "losses cannot be compared with the published ones."
        )
    drawn = tuple(samples_drawn(dataset, SPLIT, ASKED, SEQ_LENGTH))
    if drawn != DRAWN:
        return (
            f"Not the published data set: Megatron draws {_listed(drawn)} samples from its splits where "
            f"its author's run drew {_listed(DRAWN)}; losses cannot be compared with the published ones."
        )
    return (
        f"As published: {DOCUMENTS:,} documents, and {_listed(DRAWN)} samples of {SEQ_LENGTH:,} tokens "
        "in whole epochs of the splits, as in its author's log."
    )


def samples_drawn(
    dataset: Dataset, split: Sequence[int], asked: Sequence[int], seq_length: int
) -> Iterator[int]:
    """Samples in the fewest whole epochs that have as many as were asked for, by split.

    As `GPTDataset` counts them (0.15 to 0.19): one token more than the samples hold is needed.
    """
    bounds = [
        round(sum(split[:end]) / sum(split) * dataset.documents) for end in range(len(split) + 1)
    ]
    for (begin, end), wanted in zip(pairwise(bounds), asked, strict=True):
        tokens = int(dataset.lengths[begin:end].sum())
        epochs = -(-(wanted * seq_length + 1) // tokens) if tokens else 0
        yield (epochs * tokens - 1) // seq_length if tokens else 0


def _listed(numbers: Sequence[int]) -> str:
    return " / ".join(f"{number:,}" for number in numbers)
