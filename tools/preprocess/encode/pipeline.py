"""Blocks to ids as Megatron stores them: read, encoded, written at once; in order, in bounded memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.preprocess.dataset.files import TokenType
from tools.preprocess.encode.encoders import Encoder, Ids, Offsets
from tools.preprocess.input.documents import Documents, Problem, ProblemKind, Text, utf8_size
from tools.preprocess.input.files import BLOCK_BYTES, Block

Int32s = NDArray[np.int32]
_SHORT_DOCUMENT_TOKENS = 256
"""Below this mean length one masked copy is faster than a copy for each document."""


@dataclass(frozen=True)
class Packed:
    """What one block adds to a data set."""

    tokens: NDArray[Any]
    """Of the data set's dtype."""
    lengths: Int32s
    """Tokens of each sequence."""
    counts: Int32s
    """Sequences of each document; 0 marks an empty one."""
    text_bytes: int
    """UTF-8 bytes of the texts."""


def pack(texts: Sequence[Text], encoder: Encoder, dtype: TokenType, eod: int | None) -> Packed:
    """Encode documents and lay them out as Megatron's script does.

    A text without tokens is no sequence; a document without sequences gets no end-of-document token
    but keeps its boundary. The token belongs to the document's last sequence.
    """
    flat, sentences = _flatten(texts)
    ids, offsets = encoder.encode(flat)
    text_bytes = sum(map(utf8_size, flat))
    lengths = np.diff(offsets).astype(np.int32)
    counts = _sequences_a_document(lengths, sentences)
    lengths = lengths[lengths > 0]
    if eod is None:
        return Packed(ids.astype(dtype), lengths, counts, text_bytes)
    last = np.cumsum(counts)[counts > 0] - 1
    lengths[last] += 1
    ends = np.cumsum(lengths, dtype=np.int64)[last]
    return Packed(_insert(ids, ends, dtype, eod), lengths, counts, text_bytes)


def _flatten(texts: Sequence[Text]) -> tuple[Sequence[str], Int32s | None]:
    """All texts in one list and the number of each document's; None stands for one each."""
    if all(isinstance(text, str) for text in texts):
        return texts, None  # type: ignore[return-value]
    lists = [[text] if isinstance(text, str) else text for text in texts]
    return [text for texts in lists for text in texts], np.array([len(t) for t in lists], np.int32)


def _sequences_a_document(lengths: Int32s, sentences: Int32s | None) -> Int32s:
    filled = lengths > 0
    if sentences is None:
        return filled.astype(np.int32)
    owners = np.repeat(np.arange(len(sentences)), sentences)
    return np.bincount(owners[filled], minlength=len(sentences)).astype(np.int32)


def _insert(ids: Ids, ends: Offsets, dtype: TokenType, eod: int) -> NDArray[Any]:
    """`ids` with `eod` before each of the positions `ends` of the result."""
    tokens = np.empty(len(ids) + len(ends), dtype=dtype)
    places = ends - 1
    if len(ids) < _SHORT_DOCUMENT_TOKENS * len(ends):
        own = np.ones(len(tokens), dtype=bool)
        own[places] = False
        tokens[own] = ids
    else:
        start = 0
        for index, place in enumerate(places.tolist()):
            tokens[start:place] = ids[start - index : place - index]
            start = place + 1
    tokens[places] = eod
    return tokens


IN_FLIGHT_BYTES = 8 * BLOCK_BYTES
"""Text between reading and writing, at most; a longer document passes alone."""


@dataclass(frozen=True)
class Encoded:
    """A block on its way to the disk, without its texts, which are large."""

    block: Block
    line_count: int
    problems: tuple[Problem, ...]
    packed: tuple[Packed, ...]
    """One for each JSON key."""


@dataclass(frozen=True)
class Pipeline:
    """Parses, encodes and packs blocks on several threads, keeping their order."""

    parse: Callable[[Block], Documents]
    encoder: Encoder
    dtype: TokenType
    eod: int | None
    threads: int
    clock: Callable[[str], AbstractContextManager[None]]
    """Measures a stage; see `Progress.clock`."""

    def run(self, blocks: Iterator[Block]) -> Iterator[Encoded]:
        """Yield every block, encoded, in order."""
        pending: deque[tuple[int, Future[Encoded]]] = deque()
        in_flight = 0
        with ThreadPoolExecutor(self.threads, thread_name_prefix="encode") as pool:
            try:
                for block in blocks:
                    while pending and in_flight + block.size_bytes > IN_FLIGHT_BYTES:
                        size, future = pending.popleft()
                        in_flight -= size
                        yield future.result()
                        del future  # or it would keep its block until the next one
                    pending.append((block.size_bytes, pool.submit(self._encode, block)))
                    in_flight += block.size_bytes
                    del block
                while pending:
                    yield pending.popleft()[1].result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _encode(self, block: Block) -> Encoded:
        with self.clock("reading"):
            documents = self.parse(block)
            if isinstance(block.data, bytearray):
                block.data.clear()  # a large document; its text is all that is still needed
        with self.clock("encoding"):
            packed = tuple(
                pack(column, self.encoder, self.dtype, self.eod) for column in documents.columns
            )
        empty = (
            Problem(ProblemKind.EMPTY_DOCUMENT, documents.lines[index])
            for column in packed
            for index in (column.counts == 0).nonzero()[0].tolist()
        )
        return Encoded(
            block=replace(block, data=b"", columns=None),
            line_count=documents.line_count,
            problems=(*documents.problems, *empty),
            packed=packed,
        )


def default_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
