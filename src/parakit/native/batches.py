"""Megatron's batches in Megatron's order, from the same `.bin/.idx`.

Megatron splits documents into training, validation and test before it cuts anything into samples, so
no sample of one reaches into another. It shuffles the documents of a part epoch by epoch, lays them end
to end, cuts the stream into samples of `seq_length` tokens (plus one, the last label), and shuffles the
samples. Both shuffles come from one `numpy.random.RandomState(seed)`, so the order can be had without
Megatron.
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
"""Megatron keeps the last epoch out of the shuffle if less than this share of it is used."""


class SplitSamples:
    """One part as samples of `seq_length` + 1 tokens, in the order they are consumed."""

    def __init__(
        self,
        prefix: Path,
        split: str,
        samples: int,
        seq_length: int,
        seed: int,
        part: Split = Split.TRAINING,
    ) -> None:
        dataset = open_dataset(prefix)
        lengths = np.array(dataset.lengths)
        self._tokens = dataset.stored
        self._starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self._seq_length = seq_length
        documents = split_documents(split, len(lengths), part)
        per_epoch = int(lengths[documents].sum(dtype=np.int64))
        epochs = count_epochs(samples, per_epoch, seq_length)
        before_last = count_samples(epochs - 1, per_epoch, seq_length)
        a_whole_epoch = count_samples(1, per_epoch, seq_length)
        separate = epochs > 1 and samples - before_last < int(
            SEPARATE_LAST_EPOCH_BELOW * a_whole_epoch
        )
        random = np.random.RandomState(seed)
        self._documents = _document_order(documents, epochs, separate, random)
        # Where each document of the order begins in the stream.
        self._offsets = np.concatenate(([0], np.cumsum(lengths[self._documents], dtype=np.int64)))
        total = count_samples(epochs, per_epoch, seq_length)
        # All samples, the first shuffled among themselves and the rest among themselves.
        first = before_last if separate else total
        order = np.arange(total)
        random.shuffle(order[:first])
        random.shuffle(order[first:])
        self._samples = order

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        """Sample `number` in consumption order, shape [seq_length + 1]."""
        begin = int(self._samples[number]) * self._seq_length
        end = begin + self._seq_length + 1
        pieces = []
        place = int(np.searchsorted(self._offsets, begin, side="right")) - 1
        while begin < end:
            start = self._starts[self._documents[place]] - self._offsets[place]
            stop = min(end, int(self._offsets[place + 1]))
            pieces.append(self._tokens[start + begin : start + stop])
            begin, place = stop, place + 1
        return np.concatenate(pieces).astype(np.int64)

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of samples `first` to `first + size`, each [size, seq_length]."""
        rows = torch.from_numpy(np.stack([self[first + offset] for offset in range(size)]))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def micro_batches(
    settings: Settings, ranks: RankLayout, samples: SplitSamples, first: int
) -> list[MicroBatch]:
    """This rank's micro batches of the global batch from sample `first` on, one from each step.

    A step takes a micro batch from each replica in turn.
    """
    size = settings.micro_batch_size
    step = size * ranks.data_size
    begin = first + ranks.data_rank * size
    batches = (
        samples.batch(at, size) for at in range(begin, first + settings.global_batch_size, step)
    )
    return [(tokens.to(ranks.device), labels.to(ranks.device)) for tokens, labels in batches]


def _document_order(
    documents: NDArray[np.int32], epochs: int, separate: bool, random: np.random.RandomState
) -> NDArray[np.int32]:
    if separate:
        first = _document_order(documents, epochs - 1, False, random)
        return np.concatenate((first, _document_order(documents, 1, False, random)))
    order = np.tile(documents, epochs)
    random.shuffle(order)
    return order
