"""Let an iteration begin again: data iterators give the same micro batches, and model chunks are found again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from parakit.accounting import is_megatron_fsdp


def unwrap_chunk(chunk: Any) -> Any:
    """Return a model chunk without its wrappers, also without the inner wrapper of Megatron-FSDP."""
    # Every version of Megatron has the function in this module.
    from megatron.training.checkpointing import unwrap_model

    chunk = unwrap_model(chunk)
    while is_megatron_fsdp(chunk):
        chunk = unwrap_model(chunk.module)
    return chunk


@dataclass(frozen=True)
class _ReplayedIterator:
    """One of Megatron's data iterators, its source, and the micro batches that were read so far."""

    iterator: Any
    source: Iterator[Any]
    read_batches: list[Any] = field(default_factory=list)

    def rewind(self) -> None:
        """Let the iterator read the stored micro batches from the first one on, and then further ones.

        The first call replaces the iterator's source by one that stores what it gives.
        """
        self.iterator.iterable = self._repeat_and_continue()

    def _repeat_and_continue(self) -> Iterator[Any]:
        """Yield copies of the micro batches that were read, then of further ones, which are stored."""
        for batch in tuple(self.read_batches):
            yield copy(batch)
        for batch in self.source:
            self.read_batches.append(batch)
            yield copy(batch)


@contextmanager
def replay_data(data: Any) -> Iterator[Callable[[], None]]:
    """Yield a function that makes data iterators give the same micro batches again.

    Within the context, the iterators read from a source that stores each micro batch. When the context ends, they
    read from their own sources again.

    Args:
        data: One iterator, a list of iterators, or None on ranks without data.
    """
    iterators = data if isinstance(data, list) else [data]
    replayed = [
        _ReplayedIterator(iterator, iterator.iterable)
        for iterator in iterators
        if iterator is not None
    ]

    def rewind() -> None:
        for replayed_iterator in replayed:
            replayed_iterator.rewind()

    # The first call stores nothing again: it replaces the sources, so that all micro batches are stored from now on.
    rewind()
    try:
        yield rewind
    finally:
        for replayed_iterator in replayed:
            replayed_iterator.iterator.iterable = replayed_iterator.source
