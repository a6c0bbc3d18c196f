"""Turn blocks of text into ids as Megatron stores them, on several threads, in order and in bounded memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from parakit.data import DocumentIndex, IntArray, TokenType
from tools.preprocess.documents import Parser, Problem, ProblemKind, Text, utf8_size
from tools.preprocess.encoders import Encoder
from tools.preprocess.lines import BLOCK_BYTES, Block

IN_FLIGHT_BYTES = 8 * BLOCK_BYTES
"""Largest number of bytes of text between reading and writing; a longer document passes alone."""


@dataclass(frozen=True)
class Packed:
    """Tokens and documents that one block adds to a data set."""

    tokens: IntArray
    """Token ids in the data set's dtype."""
    index: DocumentIndex
    text_bytes: int
    """UTF-8 bytes of the texts."""


def pack(texts: Sequence[Text], encoder: Encoder, dtype: TokenType, eod: int | None) -> Packed:
    """Encode documents, and return their tokens and index as Megatron's script stores them.

    A document is a text or a list of sentences. Each text or sentence gives one sequence, unless it has no tokens. The
    end-of-document token is appended to the last sequence of a document. A document without sequences gets no such
    token, but keeps its boundary.

    Args:
        texts: The documents.
        encoder: Encoder of the texts.
        dtype: Type of the stored tokens.
        eod: Id of the end-of-document token, or None to append none.
    """
    documents = [[text] if isinstance(text, str) else text for text in texts]
    sentences = [sentence for document in documents for sentence in document]
    ids, offsets = encoder.encode(sentences)
    tokens_per_sentence = np.diff(offsets)
    has_tokens = tokens_per_sentence > 0
    # Sentences without tokens are no sequences: a document's boundary counts the sequences before it.
    sequences_before_sentence = np.cumsum(np.concatenate(([0], has_tokens)))
    sentences_before_document = np.cumsum([0, *map(len, documents)])
    boundaries = sequences_before_sentence[sentences_before_document]
    lengths = tokens_per_sentence[has_tokens].astype(np.int32)
    tokens = ids.astype(dtype)
    del ids  # For a large document, `ids` takes more memory than all that follows.
    if eod is not None:
        has_sequences = np.diff(boundaries) > 0
        last_sequences = boundaries[1:][has_sequences] - 1
        sequence_ends = np.cumsum(lengths, dtype=np.int64)
        tokens = np.insert(tokens, sequence_ends[last_sequences], eod)
        lengths[last_sequences] += 1
    return Packed(tokens, DocumentIndex(lengths, boundaries), sum(map(utf8_size, sentences)))


@dataclass(frozen=True)
class Encoded:
    """Encoded block that is to be written. Its texts are dropped, because they are large."""

    block: Block
    line_count: int
    problems: tuple[tuple[int, Problem], ...]
    """Problems, each with its line (or row) within the block, from 0."""
    packed: tuple[Packed, ...]
    """Tokens and documents per JSON key."""


@dataclass(frozen=True)
class Pipeline:
    """Pipeline that parses, encodes and packs blocks on several threads, and keeps their order."""

    parser: Parser
    encoder: Encoder
    dtype: TokenType
    eod: int | None
    threads: int

    def run(self, blocks: Iterator[Block]) -> Iterator[Encoded]:
        """Yield the encoded blocks in the order of the blocks.

        At most `IN_FLIGHT_BYTES` of text are in memory, unless a single block is larger.
        """
        pending: deque[tuple[int, Future[Encoded]]] = deque()
        in_flight = 0
        with ThreadPoolExecutor(self.threads, thread_name_prefix="encode") as pool:
            try:
                for block in blocks:
                    while pending and in_flight + block.size_bytes > IN_FLIGHT_BYTES:
                        size, future = pending.popleft()
                        in_flight -= size
                        yield future.result()
                        del future  # Else it would keep its block in memory until the next one.
                    pending.append((block.size_bytes, pool.submit(self._encode, block)))
                    in_flight += block.size_bytes
                    del block
                while pending:
                    yield pending.popleft()[1].result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _encode(self, block: Block) -> Encoded:
        """Parse a block, encode its documents, and return the tokens per key and the problems.

        Documents without tokens are reported as problems. The content of a block with one long line is cleared.
        """
        rows = self.parser.parse(block.content)
        if isinstance(block.content, bytearray):
            # From here on, only the parsed text of this large document is needed.
            block.content.clear()
        documents: list[Sequence[Text]] = []
        lines: list[int] = []  # The line of each document within the block.
        problems: list[tuple[int, Problem]] = []
        for line, row in enumerate(rows):
            if isinstance(row, Problem):
                problems.append((line, row))
            else:
                documents.append(row)
                lines.append(line)
        packed: list[Packed] = []
        for key_index in range(len(self.parser.keys)):
            texts = [document[key_index] for document in documents]
            packed.append(pack(texts, self.encoder, self.dtype, self.eod))
        for packed_key in packed:
            sequences_per_document = np.diff(packed_key.index.boundaries)
            for document_index in np.flatnonzero(sequences_per_document == 0).tolist():
                problem = Problem(ProblemKind.EMPTY_DOCUMENT)
                problems.append((lines[document_index], problem))
        return Encoded(replace(block, content=None), len(rows), tuple(problems), tuple(packed))


def default_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
