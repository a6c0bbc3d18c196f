"""The three growing files of one JSON key: tokens, sequence lengths, sequences of each document."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tools.preprocess.durable import pieces, sync
from tools.preprocess.errors import OutputError
from tools.preprocess.index import TokenType
from tools.preprocess.manifest import ShardHash
from tools.preprocess.pack import Packed


class Output:
    """Appends blocks; `sync` makes them a shard."""

    def __init__(self, base: Path, dtype: TokenType, done: list[ShardHash]) -> None:
        self.done = done
        self._itemsize = dtype.itemsize
        self._sha256 = hashlib.sha256()
        self._reset()
        sizes = {
            ".bin": sum(shard.tokens for shard in done) * dtype.itemsize,
            ".lengths": sum(shard.sequences for shard in done) * 4,
            ".counts": sum(shard.documents for shard in done) * 4,
        }
        if done:
            self._rehash(base.with_name(base.name + ".bin"))
        self._files = [
            _open_at(base.with_name(base.name + suffix), size) for suffix, size in sizes.items()
        ]

    @property
    def sha256(self) -> str:
        """Of the whole `.bin` so far."""
        return self._sha256.hexdigest()

    def append(self, block: Packed) -> None:
        """Add a block."""
        data = memoryview(block.tokens).cast("B")
        self._sha256.update(data)
        for file, raw in zip(
            self._files, (data, block.lengths.data, block.counts.data), strict=True
        ):
            file.write(raw)
        self._documents += len(block.counts)
        self._sequences += len(block.lengths)
        self._tokens += len(block.tokens)
        self._text_bytes += block.text_bytes

    def sync(self) -> ShardHash:
        """Flush everything appended since the last time to the disk."""
        for file in self._files:
            sync(file)
        shard = ShardHash(
            documents=self._documents,
            sequences=self._sequences,
            tokens=self._tokens,
            text_bytes=self._text_bytes,
            sha256=self.sha256,
        )
        self.done.append(shard)
        self._reset()
        return shard

    def close(self) -> None:
        """Let go of the files; what is not synced may be lost, and is not counted on."""
        for file in self._files:
            with suppress(OSError):  # a full disk, told of already
                file.close()

    def _reset(self) -> None:
        self._documents = self._sequences = self._tokens = self._text_bytes = 0

    def _rehash(self, path: Path) -> None:
        """Hash what earlier runs committed, and check it on the way."""
        with path.open("rb") as stream:
            for number, shard in enumerate(self.done):
                for piece in pieces(stream, shard.tokens * self._itemsize):
                    self._sha256.update(piece)
                if self.sha256 != shard.sha256:
                    raise OutputError(
                        f"Shard {number} in {path} is damaged (its sha256 is not the journal's); "
                        "start over with --restart."
                    )


def _open_at(path: Path, size: int) -> BinaryIO:
    """Open for appending at `size`, cutting off what lies beyond."""
    stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    if os.fstat(stream.fileno()).st_size < size:
        stream.close()
        raise OutputError(f"{path} is shorter than its journal says; start over with --restart.")
    stream.truncate(size)
    stream.seek(size)
    return stream
