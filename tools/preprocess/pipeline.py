"""One run: read, encode and write in a pipeline whose parts overlap, in the order of the input."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tools.preprocess.documents import Documents
from tools.preprocess.encoders import Encoder
from tools.preprocess.index import TokenType
from tools.preprocess.inputs import BLOCK_BYTES, Block
from tools.preprocess.pack import Packed, pack

IN_FLIGHT_BYTES = 8 * BLOCK_BYTES
"""Text between reading and writing; a longer document passes alone."""


@dataclass(frozen=True)
class Encoded:
    """A block on its way to the disk."""

    block: Block
    documents: Documents
    packed: tuple[Packed, ...]


@dataclass
class Pipeline:
    """Parses, encodes and packs blocks on several threads, keeping their order."""

    parse: Callable[[Block], Documents]
    encoder: Encoder
    dtype: TokenType
    eod: int | None
    threads: int
    _pending: deque[tuple[int, Future[Encoded]]] = field(default_factory=deque)

    def run(self, blocks: Iterator[Block]) -> Iterator[Encoded]:
        """Yield every block, encoded, in order; holds `IN_FLIGHT_BYTES` of text at most."""
        in_flight = 0
        with ThreadPoolExecutor(self.threads, thread_name_prefix="encode") as pool:
            try:
                for block in blocks:
                    while self._pending and (
                        in_flight + block.size_bytes > IN_FLIGHT_BYTES
                        or len(self._pending) > 2 * self.threads
                    ):
                        size, future = self._pending.popleft()
                        in_flight -= size
                        yield future.result()
                    self._pending.append((block.size_bytes, pool.submit(self._encode, block)))
                    in_flight += block.size_bytes
                while self._pending:
                    yield self._pending.popleft()[1].result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _encode(self, block: Block) -> Encoded:
        documents = self.parse(block)
        packed = tuple(
            pack(column, self.encoder, self.dtype, self.eod) for column in documents.columns
        )
        return Encoded(block, documents, packed)


def default_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
