"""Read Megatron's batches, in Megatron's order, from the same `.bin/.idx` data set.

Megatron divides the documents into a training, a validation and a test part before it cuts samples, so no
sample crosses the bounds of a part. It shuffles the documents of a part once per epoch and joins them to one
stream of tokens. It cuts the stream into samples of `seq_length` tokens, plus one token that is only a label,
and shuffles the samples. Both shuffles use one `numpy.random.RandomState(seed)`, so this module can reproduce
the order without Megatron (`megatron/core/datasets/gpt_dataset.py`, version 0.19).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from parakit.data import Split, count_epochs, count_samples, open_dataset, split_documents
from parakit.native.parallel import RankLayout
from parakit.native.settings import Settings

MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, each [micro batch, sequence]."""

SEPARATE_LAST_EPOCH_BELOW = 0.80
"""Megatron shuffles the last epoch separately if a run uses less than this fraction of it."""


class SplitSamples:
    """Samples of one part of a data set, in the order in which Megatron consumes them."""

    def __init__(
        self,
        prefix: Path,
        split: str,
        samples: int,
        seq_length: int,
        seed: int,
        part: Split = Split.TRAINING,
    ) -> None:
        """Open the data set and compute the order of documents and samples.

        Args:
            prefix: Path of the data set without suffix.
            split: Weights of the parts, such as `949,50,1`.
            samples: Number of samples that the run requests. The order of the samples depends on this number.
            seq_length: Tokens per sample.
            seed: Seed of both shuffles.
            part: The part that is read.

        Raises:
            DatasetError: The data set is missing or damaged, or `split` is not valid.
        """
        dataset = open_dataset(prefix)
        lengths = np.array(dataset.lengths)
        self._tokens = dataset.stored
        self._document_starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self._seq_length = seq_length
        documents = split_documents(split, len(lengths), part)
        tokens_per_epoch = int(lengths[documents].sum(dtype=np.int64))
        epochs = count_epochs(samples, tokens_per_epoch, seq_length)
        samples_before_last_epoch = count_samples(epochs - 1, tokens_per_epoch, seq_length)
        samples_per_epoch = count_samples(1, tokens_per_epoch, seq_length)
        samples_of_last_epoch = samples - samples_before_last_epoch
        fewest_to_mix = int(SEPARATE_LAST_EPOCH_BELOW * samples_per_epoch)
        is_last_separate = epochs > 1 and samples_of_last_epoch < fewest_to_mix
        random = np.random.RandomState(seed)
        self._documents = _order_documents(
            documents, epochs, is_last_separate=is_last_separate, random=random
        )
        # Position of each document in the stream of all epochs.
        self._stream_offsets = np.concatenate(
            ([0], np.cumsum(lengths[self._documents], dtype=np.int64))
        )
        total_samples = count_samples(epochs, tokens_per_epoch, seq_length)
        # Megatron shuffles the samples of a separate last epoch among themselves, after all others.
        num_shuffled_first = samples_before_last_epoch if is_last_separate else total_samples
        order = np.arange(total_samples)
        random.shuffle(order[:num_shuffled_first])
        random.shuffle(order[num_shuffled_first:])
        self._sample_order = order

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """Return the token ids of sample `number` in the order of consumption, [seq_length + 1]."""
        # Positions in the stream, in which the documents of all epochs follow each other.
        begin = int(self._sample_order[number]) * self._seq_length
        end = begin + self._seq_length + 1
        pieces = []
        index = int(np.searchsorted(self._stream_offsets, begin, side="right")) - 1
        while begin < end:
            # Difference between a token's position in the `.bin` and in the stream, for this document.
            shift = self._document_starts[self._documents[index]] - self._stream_offsets[index]
            document_end = int(self._stream_offsets[index + 1])
            stop = min(end, document_end)
            pieces.append(self._tokens[shift + begin : shift + stop])
            begin = stop
            index += 1
        return np.concatenate(pieces).astype(np.int64)

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of the samples `first` to `first + size - 1`, each [size, seq_length].

        The label of a position is the next token.
        """
        samples = np.stack([self[number] for number in range(first, first + size)])
        rows = torch.from_numpy(samples)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def micro_batches(
    settings: Settings, ranks: RankLayout, samples: SplitSamples, first: int
) -> list[MicroBatch]:
    """Return this rank's micro batches of one global batch, on its device.

    The data-parallel ranks take the micro batches of the global batch in turn: rank 0 takes the first, rank 1
    the second, and so on.

    Args:
        settings: The run's batch sizes.
        ranks: This rank's position.
        samples: Samples in the order of consumption.
        first: Number of the first sample of the global batch.
    """
    size = settings.micro_batch_size
    begin = first + ranks.data_rank * size
    end = first + settings.global_batch_size
    batches = []
    for start in range(begin, end, size * ranks.data_size):
        tokens, labels = samples.batch(start, size)
        batches.append((tokens.to(ranks.device), labels.to(ranks.device)))
    return batches


def _order_documents(
    documents: NDArray[np.int32],
    epochs: int,
    *,
    is_last_separate: bool,
    random: np.random.RandomState,
) -> NDArray[np.int32]:
    """Return the indices of the documents of all epochs, shuffled over all these epochs together.

    If `is_last_separate` is True, the last epoch is shuffled separately and comes at the end.
    """
    if is_last_separate:
        first_epochs = _order_documents(
            documents, epochs - 1, is_last_separate=False, random=random
        )
        last_epoch = _order_documents(documents, 1, is_last_separate=False, random=random)
        return np.concatenate((first_epochs, last_epoch))
    order = np.tile(documents, epochs)
    random.shuffle(order)
    return order
