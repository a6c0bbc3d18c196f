"""Read data sets of the Hugging Face hub (or of a folder like one): streamed, or fetched as JSON lines.

Streaming stores nothing and needs the connection to the end. Fetching survives dropped connections: files that
arrived, even partly, stay in `.hub` next to the result until the result is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from parakit.artifacts.io import atomic_write
from parakit.config.reachable import explain_unreachable
from parakit.data import (
    HUB_CACHES,
    HUB_PREFIX,
    Dataset,
    DatasetError,
    InputIdentity,
    count_draws,
    count_samples,
    find_default_hub_cache,
)
from tools.preprocess.lines import Block

DEFAULT_ENDPOINT = "https://huggingface.co"

_CACHE = ".hub"
"""Folder of fetched files, next to the result: a container's home folder would not outlive the container."""
_STREAMED_ROWS = 64
"""Rows per request; few, because a row may be large."""
_FETCHED_ROWS = 1000

OPENWEBTEXT = "vuiseng9/openwebtext-10k"
"""Data set of the published runs.

Neither its number of tokens nor a hash was published. The author's log (gpt2-xl on four GPUs, 2025-10-11) has the
number of documents and of the samples that Megatron drew, which follows from the documents' lengths.
"""
DOCUMENTS = 10_000
_SPLIT, _SEQ_LENGTH = "949,50,1", 1024
_ASKED = (2_000_000, 400_040, 40)
"""Samples that the published run needed from the training, validation and test split."""
_DRAWN = (2_008_302, 400_551, 45)
"""Samples that whole epochs of each split had."""


@dataclass(frozen=True)
class Hub:
    """One split of a data set on the Hugging Face hub.

    The flags are `--input hub:NAME`, `--hub-config` and `--hub-split`.
    """

    name: str
    config: str | None
    split: str

    @property
    def label(self) -> str:
        """Name of the split in messages and manifests."""
        config = f"/{self.config}" if self.config else ""
        return f"{HUB_PREFIX}{self.name}{config}:{self.split}"

    def fetch(self, key: str, lines: Path) -> None:
        """Download the data set and write its column `key` to the file `lines` as JSON lines.

        A line is an object with the name of the column and one text. The file appears only when it is complete. The
        download's cache beside the file is then removed. After an error the cache stays, so that the next call resumes
        the download. Environment variables of the hub's client may be set.

        Raises:
            DatasetError: The data set cannot be fetched or written.
        """
        cache = lines.with_name(_CACHE)
        self._configure_client(cache)
        unreachable = _go_offline_if_unreachable()
        import datasets  # Takes seconds, which a call that finds the file does not need.

        try:
            lines.parent.mkdir(parents=True, exist_ok=True)
            table = datasets.load_dataset(self.name, self.config, split=self.split)
            _write_column(table, key, lines)
        except Exception as error:  # The client's errors have no common base class.
            raise self._explain_failed_fetch(error, unreachable, lines) from None
        shutil.rmtree(cache, ignore_errors=True)

    def _configure_client(self, cache: Path) -> None:
        """Set environment variables of the hub's client, which reads them when it is imported.

        Args:
            cache: Folder of the download. It is not used if the user has set a cache, or if the default cache holds the
                data set.
        """
        has_cache = any(os.environ.get(name) for name in (*HUB_CACHES, "HF_HUB_OFFLINE"))
        if not has_cache and find_default_hub_cache(self.name) is None:
            os.environ["HF_HUB_CACHE"] = str(cache / "files")
            os.environ["HF_DATASETS_CACHE"] = str(cache / "tables")
        # The plain download resumes within a file; the chunked one needs services that mirrors lack.
        os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

    def _explain_failed_fetch(
        self, error: Exception, unreachable: str, lines: Path
    ) -> DatasetError:
        """Return the error that reports why `fetch` failed, with what the user can do.

        Args:
            error: The error of the hub's client, or of writing a file.
            unreachable: Why the hub does not answer; empty if it answers.
            lines: The file that was to be written.
        """
        if isinstance(error, OSError):
            file = str(error.filename or "")
            if file.startswith(str(lines.parent)):
                return DatasetError(
                    f"{file} cannot be written ({error.strerror}); free some room in {lines.parent}."
                )
        endpoint = os.environ.get("HF_ENDPOINT") or "the Hugging Face hub"
        reason = unreachable or _describe_error(error)
        return DatasetError(
            f"Data set {self.name} was not fetched from {endpoint} ({reason}); run the "
            "same command again (files that arrived whole are kept), name a mirror with "
            "HF_ENDPOINT= or a cache that has it with HF_HOME=, or use other text: 'make "
            f"prepare-ds-sample', or 'make prepare-ds INPUT=file.jsonl NAME={lines.stem}'."
        )

    def identity(self) -> InputIdentity:
        """Return the identity of the split's files: their commit on the hub, or their time stamps in a folder."""
        builder, _ = self._opened
        files = (builder.config.data_files or {}).get(self.split)
        origin = getattr(files, "origin_metadata", None) or [builder.hash]
        digest = hashlib.sha256(repr(sorted(map(str, origin))).encode()).hexdigest()
        return InputIdentity(self.label, 0, 0, digest)

    def blocks(self, offset: int, keys: Sequence[str]) -> Iterator[Block]:
        """Yield the blocks of the streamed split, from row `offset` on.

        Raises:
            DatasetError: The split cannot be read, or lacks a column.
        """
        from tools.preprocess import tables  # Imports pyarrow, which other inputs do not need.

        try:
            for table in self._opened[1].skip(offset).with_format("arrow").iter(_STREAMED_ROWS):
                tables.check_columns(table.column_names, self.label, keys)
                offset += table.num_rows
                yield tables.row_block(table.select(list(keys)), keys, offset, 0)
        except DatasetError:
            raise
        except Exception as error:
            raise self._make_error(error) from None

    @cached_property
    def _opened(self) -> tuple[Any, Any]:
        """Description of the data set by the hub's client, and the split as a stream of rows."""
        unreachable = _go_offline_if_unreachable()
        import datasets  # Takes seconds, which other inputs do not need.

        try:
            builder = datasets.load_dataset_builder(self.name, self.config)
            return builder, builder.as_streaming_dataset(split=self.split)
        except Exception as error:
            raise self._make_error(error, unreachable) from None

    def _make_error(self, error: Exception, unreachable: str = "") -> DatasetError:
        """Return the error that reports why the split cannot be read; `unreachable` is why the hub does not answer."""
        return DatasetError(
            f"{self.label} cannot be read ({unreachable or _describe_error(error)}); check name, split and network, or "
            "download it and give its files with --input."
        )


def _write_column(table: Any, key: str, lines: Path) -> None:
    """Write a column of a table of the hub's client as JSON lines. The file appears only when it is complete."""
    with atomic_write(lines) as stream:
        for batch in table.select_columns([key]).iter(_FETCHED_ROWS):
            for text in batch[key]:
                stream.write(json.dumps({key: text}, ensure_ascii=False).encode() + b"\n")


def _go_offline_if_unreachable() -> str:
    """Set HF_HUB_OFFLINE if the hub does not answer, and return the reason.

    The hub's client then uses its caches alone. Otherwise it would repeat each request for a minute. The result is
    empty if the hub answers, or if HF_HUB_OFFLINE is set already. Call this function before the client is imported,
    because the client reads the variable then.
    """
    if os.environ.get("HF_HUB_OFFLINE"):
        return ""
    reason = explain_unreachable(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT)
    if reason:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return reason


def _describe_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return f"{type(error).__name__}: {first}"


def comparison(dataset: Dataset) -> str:
    """Return a sentence that says that a data set is the published `OPENWEBTEXT`, or what differs from it."""
    differs = "losses cannot be compared with the published ones."
    if dataset.documents != DOCUMENTS:
        return (
            f"Not the published data set: {dataset.documents:,} documents instead of {DOCUMENTS:,}; "
            f"{differs}"
        )
    draws = count_draws(dataset, _SPLIT, _SEQ_LENGTH, *_ASKED)
    drawn = tuple(count_samples(part.epochs, part.tokens, _SEQ_LENGTH) for part in draws)
    if drawn != _DRAWN:
        return (
            f"Not the published data set: Megatron draws {_join_numbers(drawn)} samples from its splits where "
            f"its author's run drew {_join_numbers(_DRAWN)}; {differs}"
        )
    return (
        f"As published: {DOCUMENTS:,} documents, and {_join_numbers(_DRAWN)} samples of {_SEQ_LENGTH:,} "
        "tokens in whole epochs of the splits, as in its author's log."
    )


def _join_numbers(numbers: Iterable[int]) -> str:
    """Return numbers with thousands separators, such as `1,000 / 20`."""
    return " / ".join(f"{number:,}" for number in numbers)
