"""Read, encode and write at the same time, in the order of the input, with bounded memory."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tools.preprocess.dataset.index import TokenType
from tools.preprocess.encode.encoders import Encoder
from tools.preprocess.encode.pack import Packed, pack
from tools.preprocess.input.documents import Documents
from tools.preprocess.input.files import BLOCK_BYTES, Block

IN_FLIGHT_BYTES = 8 * BLOCK_BYTES
"""Text between reading and writing, at most; a longer document passes alone."""


@dataclass(frozen=True)
class Encoded:
    """A block on its way to the disk."""

    slice_index: int
    block: Block
    documents: Documents
    packed: tuple[Packed, ...]
    """One for each JSON key."""
    parse_seconds: float
    """Processor time, as is the next one."""
    encode_seconds: float


@dataclass(frozen=True)
class Pipeline:
    """Parses, encodes and packs blocks on several threads, keeping their order."""

    parse: Callable[[Block], Documents]
    encoder: Encoder
    dtype: TokenType
    eod: int | None
    threads: int

    def run(self, blocks: Iterator[tuple[int, Block]]) -> Iterator[Encoded]:
        """Yield every block, encoded, in order."""
        pending: deque[tuple[int, Future[Encoded]]] = deque()
        in_flight = 0
        with ThreadPoolExecutor(self.threads, thread_name_prefix="encode") as pool:
            try:
                for index, block in blocks:
                    while pending and in_flight + block.size_bytes > IN_FLIGHT_BYTES:
                        size, future = pending.popleft()
                        in_flight -= size
                        yield future.result()
                        del future  # or it would keep its block until the next one
                    pending.append((block.size_bytes, pool.submit(self._encode, index, block)))
                    in_flight += block.size_bytes
                    del block
                while pending:
                    yield pending.popleft()[1].result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _encode(self, index: int, block: Block) -> Encoded:
        start = time.thread_time()
        documents = self.parse(block)
        if isinstance(block.data, bytearray):
            block.data.clear()  # a large document; its text is all that is still needed
        parsed = time.thread_time()
        packed = tuple(
            pack(column, self.encoder, self.dtype, self.eod) for column in documents.columns
        )
        encoded = time.thread_time()
        return Encoded(
            slice_index=index,
            block=Block(block.next_offset, block.size_bytes, block.read_bytes),
            documents=documents.without_texts(),
            packed=packed,
            parse_seconds=parsed - start,
            encode_seconds=encoded - parsed,
        )


def default_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
